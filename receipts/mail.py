"""What a receipt says, as text and as HTML."""

from email.utils import format_datetime

from django.core.mail import EmailMultiAlternatives
from django.template.loader import render_to_string

from shop.models import Order

MESSAGE_ID_DOMAIN = "receipts.shop.example"


def message_id(job_id: str) -> str:
    """The Message-ID of a job's mail: the same for every attempt, another for every job."""
    return f"<{job_id}@{MESSAGE_ID_DOMAIN}>"


def receipt_message(order: Order, *, job_id: str) -> EmailMultiAlternatives:
    """The receipt of an order; `job_id` is the ID of the obligation to send it."""
    context = {"order": order, "lines": order.lines.all()}
    message = EmailMultiAlternatives(
        subject=f"Your receipt for order {order.pk}",
        body=render_to_string("receipts/receipt.txt", context),
        to=[order.email],
        headers={
            "Message-ID": message_id(job_id),
            # Not the time of sending: a mail that is sent again is the same mail.
            "Date": format_datetime(order.placed_at),
            "Auto-Submitted": "auto-generated",
        },
    )
    message.attach_alternative(render_to_string("receipts/receipt.html", context), "text/html")
    return message

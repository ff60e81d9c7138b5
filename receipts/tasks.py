"""The task that meets the obligation."""

from celery import shared_task
from django.db import InterfaceError, OperationalError

from outbox.tasks import OutboxTask
from receipts.mail import receipt_message
from shop.models import Order

# What goes away and comes back: the mail server and the network (every smtplib exception is an
# OSError), and the database.
PASSING = (OSError, OperationalError, InterfaceError)


class UnknownOrder(LookupError):
    """There is no such order, and trying again will not bring it back."""

    def __init__(self, order_id: int) -> None:
        super().__init__(
            f"There is no order {order_id}: it was deleted after its receipt was owed."
            " Cancel this entry, or restore the order and retry."
        )
        self.order_id = order_id


@shared_task(
    base=OutboxTask,
    bind=True,
    owner="shop",
    autoretry_for=PASSING,
    retry_backoff=True,
    retry_backoff_max=3600,  # seconds
    max_retries=16,  # about five hours at most, halved by jitter; then the owner hears of it
)
def send_receipt(self: OutboxTask, order_id: int) -> None:
    """Send the receipt of an order.

    A worker that dies between the server's "250 OK" and the recorded end sends the mail again:
    SMTP cannot be asked. So every attempt carries the same Message-ID, by which the receiving
    side can tell a repetition from a second mail.
    """
    order = Order.objects.prefetch_related("lines").filter(pk=order_id).first()
    if order is None:
        raise UnknownOrder(order_id)
    receipt_message(order, job_id=self.request.id).send()

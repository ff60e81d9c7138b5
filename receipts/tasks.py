"""The task that meets the obligation."""

from functools import partial
from typing import Any

from celery import shared_task
from django.conf import settings
from django.db import InterfaceError, OperationalError

from outbox.tasks import OutboxTask
from receipts import by_provider, by_smtp
from receipts.mail import receipt_message
from shop.models import Order

# What goes away and comes back: the mail server or provider and the network (every error of theirs
# is an OSError), and the database.
PASSING = (OSError, OperationalError, InterfaceError)

WAYS = {"smtp": by_smtp.way, "provider": by_provider.way}


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
    """Send the receipt of an order, once as far as the way that it takes can promise that.

    The ledger knows that it was begun. What a worker does that finds it so depends on the way:
    see `WAYS`. By each of them every attempt carries the same Message-ID.
    """
    order = Order.objects.prefetch_related("lines").filter(pk=order_id).first()
    if order is None:
        raise UnknownOrder(order_id)
    way = WAYS[settings.RECEIPTS_BY]()
    self.effect(
        "mail",
        partial(way.send, receipt_message(order, job_id=self.request.id)),
        request=_request(order),
        verify=way.verify,
        on_uncertain=way.on_uncertain,
        timeout=way.timeout,
        repeat_within=way.repeat_within,
    )


def _request(order: Order) -> dict[str, Any]:
    """What makes it this receipt; nothing of how it looks, which may change between attempts."""
    return {"order": order.pk, "to": order.email, "total": str(order.total)}

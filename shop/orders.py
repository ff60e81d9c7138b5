"""Placing an order: the one place where the shop takes on an obligation."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from uuid import UUID

from django.db import transaction

from receipts.tasks import send_receipt
from shop.models import Order, OrderLine


@dataclass(frozen=True, kw_only=True)
class Line:
    """A product and how much of it is wanted; the price is in euros, for one."""

    product: str
    quantity: int
    unit_price: Decimal


def place_order(*, email: str, lines: Sequence[Line]) -> Order:
    """Write the order and owe its receipt: both are committed, or neither is.

    Raises ValueError where there is nothing to order.
    """
    if not lines:
        raise ValueError("An order needs at least one line.")
    with transaction.atomic():
        order = Order.objects.create(email=email)
        _add_lines(order, lines=lines)
        receipt = send_receipt.apply_async((order.pk,), subject=f"shop.order:{order.pk}")
        order.receipt_job = UUID(receipt.id)
        order.save(update_fields=["receipt_job"])
    return order


def _add_lines(order: Order, *, lines: Sequence[Line]) -> None:
    OrderLine.objects.bulk_create(
        OrderLine(
            order=order,
            product=line.product,
            quantity=line.quantity,
            unit_price=line.unit_price,
        )
        for line in lines
    )

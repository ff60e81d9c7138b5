"""Orders, and the obligation that each of them brings with it."""

from decimal import Decimal

from django.core.validators import MinValueValidator
from django.db import models
from django.urls import reverse
from django.utils import timezone


class Order(models.Model):
    """What a customer bought. Made by `shop.orders.place_order`, which owes a receipt for it."""

    email = models.EmailField("e-mail address")
    placed_at = models.DateTimeField(default=timezone.now, editable=False)
    receipt_job = models.UUIDField(
        null=True,
        unique=True,
        editable=False,
        help_text="ID of the outbox entry that owes the receipt; also Celery's task ID.",
    )

    class Meta:
        ordering = ["-pk"]

    def __str__(self) -> str:
        return f"Order {self.pk}"

    def get_absolute_url(self) -> str:
        return reverse("order", args=[self.pk])

    @property
    def total(self) -> Decimal:
        """The sum over all lines, in euros."""
        return sum((line.total for line in self.lines.all()), Decimal("0.00"))


class OrderLine(models.Model):
    """One product of an order, at the price of that day."""

    order = models.ForeignKey(Order, on_delete=models.CASCADE, related_name="lines")
    product = models.CharField(max_length=100)
    quantity = models.PositiveIntegerField(validators=[MinValueValidator(1)])
    unit_price = models.DecimalField(max_digits=8, decimal_places=2)

    class Meta:
        ordering = ["pk"]
        constraints = [
            models.CheckConstraint(
                condition=models.Q(quantity__gte=1), name="shop_orderline_quantity_at_least_one"
            ),
            models.CheckConstraint(
                condition=models.Q(unit_price__gte=0), name="shop_orderline_price_not_negative"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.quantity} × {self.product}"

    @property
    def total(self) -> Decimal:
        """What this line costs, in euros."""
        return self.unit_price * self.quantity

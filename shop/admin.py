"""Orders in the admin, to look at.

Nothing can be added or changed here: an order that does not come from `place_order` would owe
no receipt.
"""

from django.contrib import admin
from django.http import HttpRequest

from shop.models import Order, OrderLine


class OrderLineInline(admin.TabularInline):  # type: ignore[type-arg]  # generic for mypy only
    model = OrderLine
    extra = 0
    can_delete = False


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    list_display = ["id", "email", "placed_at", "total", "receipt_job"]
    search_fields = ["=id", "email", "=receipt_job"]
    date_hierarchy = "placed_at"
    inlines = [OrderLineInline]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Order | None = None) -> bool:
        return False

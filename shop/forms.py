"""The order form."""

from collections.abc import Iterator
from typing import Any

from django import forms
from django.forms.boundfield import BoundField

from shop.catalogue import CATALOGUE, Product
from shop.orders import Line

MOST_OF_ONE_PRODUCT = 99


def quantity_field(product: Product) -> forms.IntegerField:
    return forms.IntegerField(
        label=product.name,
        required=False,
        min_value=0,
        max_value=MOST_OF_ONE_PRODUCT,
        initial=0,
        help_text=product.note,
        error_messages={
            "invalid": "Enter a whole number.",
            "min_value": "Enter 0 or more.",
            "max_value": f"We can send at most {MOST_OF_ONE_PRODUCT} of one product.",
        },
        widget=forms.NumberInput(attrs={"inputmode": "numeric"}),
    )


class OrderForm(forms.Form):
    """An e-mail address, and for each product a field `quantity_<code>`; empty means none."""

    email = forms.EmailField(
        label="E-mail address",
        help_text="Your receipt goes here.",
        max_length=254,
        widget=forms.EmailInput(attrs={"autocomplete": "email"}),
        error_messages={
            "required": "Enter the address that your receipt should go to.",
            "invalid": "This is not an e-mail address. Enter one like name@example.com.",
        },
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for product in CATALOGUE:
            self.fields[f"quantity_{product.code}"] = quantity_field(product)

    def clean(self) -> dict[str, Any]:
        if not self.lines() and not self._quantity_errors():
            self.add_error(None, "Your order is empty. Choose at least one product.")
        return self.cleaned_data

    def lines(self) -> list[Line]:
        """What was ordered, at today's prices; call it on a form that was validated."""
        return [
            Line(product=product.name, quantity=quantity, unit_price=product.price)
            for product in CATALOGUE
            if (quantity := self.cleaned_data.get(f"quantity_{product.code}"))
        ]

    def products(self) -> Iterator[tuple[Product, BoundField]]:
        """Each product with its field, for the template."""
        return ((product, self[f"quantity_{product.code}"]) for product in CATALOGUE)

    def _quantity_errors(self) -> list[str]:
        return [name for name in self.errors if name.startswith("quantity_")]

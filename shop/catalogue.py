"""What the shop sells."""

from dataclasses import dataclass
from decimal import Decimal


@dataclass(frozen=True)
class Product:
    """Something to buy. The code is its name in forms; the price is in euros."""

    code: str
    name: str
    note: str
    price: Decimal


CATALOGUE = (
    Product("notebook", "Notebook", "dotted, 160 pages, lies flat", Decimal("12.50")),
    Product("pencils", "Pencils", "cedar, a box of twelve", Decimal("8.40")),
    Product("ink", "Ink", "blue-black, 50 ml", Decimal("14.00")),
    Product("sharpener", "Sharpener", "brass, two holes", Decimal("6.90")),
)

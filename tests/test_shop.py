"""The shop: an order and its receipt are owed together, and the pages say what happened."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

import pytest
from django.db import IntegrityError, transaction
from django.test import Client

from outbox.models import OutboxEntry
from shop.models import Order, OrderLine
from shop.orders import Line, place_order

if TYPE_CHECKING:
    from pytest_django import DjangoAssertNumQueries, Settings

pytestmark = pytest.mark.django_db

INK = Line(product="Ink", quantity=2, unit_price=Decimal("14.00"))
GOOD = {"email": "ada@example.com", "quantity_ink": "2", "quantity_pencils": ""}

MAIL = """\
From: Paper & Ink <receipts@shop.example>
To: ada@example.com
Subject: Your <receipt>
Message-ID: <1@receipts.shop.example>
MIME-Version: 1.0
Content-Type: multipart/alternative; boundary=b

--b
Content-Type: text/plain; charset=utf-8

In words
--b
Content-Type: text/html; charset=utf-8

<script>alert("boo")</script>
--b--
"""


@pytest.fixture
def order() -> Order:
    return place_order(email="ada@example.com", lines=[INK])


@pytest.fixture
def mails(settings: Settings, tmp_path: Path) -> Path:
    """A folder with one mail, beside a file that is nobody's business."""
    folder = tmp_path / "mails"
    folder.mkdir()
    (folder / "000001-1@receipts.shop.example.eml").write_text(MAIL)
    (tmp_path / "secret.eml").write_text("secret")
    settings.SHOP_MAIL_FOLDER = folder
    return folder


def nothing_is_written() -> bool:
    return not (
        Order.objects.exists() or OrderLine.objects.exists() or OutboxEntry.objects.exists()
    )


# The settings


@pytest.mark.parametrize(
    ("environment", "starts"),
    [
        ({}, True),
        ({"DJANGO_ALLOWED_HOSTS": "shop.example"}, False),
        ({"DJANGO_ALLOWED_HOSTS": "shop.example", "DJANGO_SECRET_KEY": "long and random"}, True),
    ],
)
def test_shop_that_others_can_reach_needs_a_key_of_its_own(
    environment: dict[str, str], starts: bool
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", "import shop.settings"],
        env={"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
    )
    assert (run.returncode == 0) == starts, run.stderr
    assert starts or "Set DJANGO_SECRET_KEY" in run.stderr


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RECEIPTS_BY": "pigeon"}, "RECEIPTS_BY=pigeon is not known: choose smtp or provider."),
        ({"RECEIPTS_WHEN_UNCERTAIN": "ask"}, "=ask is not known: choose repeat or park."),
        ({"RECEIPTS_BY": "provider"}, "RECEIPTS_BY=provider needs its address"),
        ({"RECEIPTS_PROVIDER_URL": "http://127.0.0.1:99999"}, "99999 is no http:// or https://"),
        ({"RECEIPTS_PROVIDER_URL": "http://[::1"}, "is no http:// or https://"),
        ({"RECEIPTS_PROVIDER_URL": "http://exa mple"}, "is no http:// or https://"),
        ({"RECEIPTS_PROVIDER_URL": "http://"}, "is no http:// or https://"),
        ({"RECEIPTS_PROVIDER_URL": "mail.example"}, "is no http:// or https://"),
        ({"RECEIPTS_PROVIDER_TOKEN": "a\nb"}, "no HTTP header can carry"),
        ({"RECEIPTS_PROVIDER_TOKEN": "€"}, "no HTTP header can carry"),
        ({"RECEIPTS_PROVIDER_LOOKUP": "maybe"}, "=maybe is not known: choose on or off."),
        ({"RECEIPTS_TIMEOUT": "soon"}, "RECEIPTS_TIMEOUT=soon is no usable time"),
        ({"RECEIPTS_TIMEOUT": "nan"}, "RECEIPTS_TIMEOUT=nan is no usable time"),
        ({"RECEIPTS_TIMEOUT": "0"}, "RECEIPTS_TIMEOUT=0 is no usable time"),
    ],
)
def test_way_of_receipts_that_cannot_work_is_refused_in_clear_words(
    environment: dict[str, str], words: str
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", "import shop.settings"],
        env={"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
    )
    assert words in run.stderr.splitlines()[-1]


# Placing an order


def test_order_owes_its_receipt(order: Order) -> None:
    entry = OutboxEntry.objects.get()
    assert entry.pk == Order.objects.get().receipt_job
    assert entry.task == "receipts.tasks.send_receipt"
    assert list(entry.args) == [order.pk]
    assert entry.subject == f"shop.order:{order.pk}"
    assert order.total == Decimal("28.00")


def test_order_that_is_rolled_back_owes_nothing() -> None:
    with transaction.atomic():
        place_order(email="ada@example.com", lines=[INK])
        transaction.set_rollback(True)
    assert nothing_is_written()


def test_order_that_cannot_be_written_owes_nothing() -> None:
    line = Line(product="Ink", quantity=0, unit_price=Decimal("14.00"))
    with pytest.raises(IntegrityError):
        place_order(email="ada@example.com", lines=[line])
    assert nothing_is_written()


def test_order_whose_receipt_cannot_be_owed_is_not_written() -> None:
    with pytest.raises(ValueError, match="at least one line"):
        place_order(email="ada@example.com", lines=[])
    assert nothing_is_written()


# The form


def test_form_places_the_order_and_leads_to_its_page(client: Client) -> None:
    response = client.post("/orders/new/", GOOD)
    order = Order.objects.get()
    assert response.status_code == 302
    assert response["Location"] == f"/orders/{order.pk}/"
    assert [str(line) for line in order.lines.all()] == ["2 × Ink"]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("email", "", "Enter the address that your receipt should go to."),
        ("email", "ada", "This is not an e-mail address."),
        ("email", "ada@example.com\nBcc: all@example.com", "This is not an e-mail address."),
        ("email", f"{'a' * 300}@example.com", "at most 254 characters"),
        ("quantity_ink", "-1", "Enter 0 or more."),
        ("quantity_ink", "100", "We can send at most 99 of one product."),
        ("quantity_ink", "9" * 5000, "Enter a whole number."),
        ("quantity_ink", "two", "Enter a whole number."),
        ("quantity_ink", "1.5", "Enter a whole number."),
    ],
)
def test_bad_input_is_explained_at_its_field(
    client: Client, field: str, value: str, words: str
) -> None:
    response = client.post("/orders/new/", GOOD | {field: value})
    page = response.content.decode()
    assert response.status_code == 422
    assert words in page
    assert f'aria-describedby="id_{field}_helptext id_{field}_error"' in page
    assert nothing_is_written()


@pytest.mark.parametrize("quantity", ["", "0"])
def test_empty_order_is_refused(client: Client, quantity: str) -> None:
    response = client.post("/orders/new/", GOOD | {"quantity_ink": quantity})
    assert response.status_code == 422
    assert "Your order is empty." in response.content.decode()
    assert nothing_is_written()


def test_form_of_another_site_is_refused() -> None:
    assert Client(enforce_csrf_checks=True).post("/orders/new/", GOOD).status_code == 403
    assert nothing_is_written()


# The pages


def test_order_page_names_the_job_and_renews_itself_while_it_is_open(
    client: Client, order: Order
) -> None:
    page = client.get(order.get_absolute_url()).content.decode()
    assert isinstance(order.receipt_job, UUID)
    assert f'data-job-id="{order.receipt_job}"' in page
    assert "Your receipt will be sent shortly." in page
    assert '<meta http-equiv="refresh"' in page
    assert "€28.00" in page


def test_order_page_rests_when_nothing_can_change(client: Client) -> None:
    order = Order.objects.create(email="ada@example.com")
    page = client.get(order.get_absolute_url()).content.decode()
    assert "no longer on record" in page
    assert "refresh" not in page


def test_list_shows_the_newest_orders_and_leads_to_older_ones(
    client: Client, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    orders = [place_order(email=f"{n}@example.com", lines=[INK]) for n in range(25)]
    with django_assert_num_queries(4):  # count, orders, lines, entries
        first = client.get("/").content.decode()
    second = client.get("/?page=2").content.decode()
    assert f">Order {orders[-1].pk}<" in first
    assert "Receipt on its way" in first
    assert f">Order {orders[0].pk}<" not in first
    assert f">Order {orders[0].pk}<" in second


@pytest.mark.parametrize("page", ["0", "-1", "999", "x", "%00"])
def test_odd_page_numbers_show_a_page(client: Client, page: str) -> None:
    assert client.get(f"/?page={page}").status_code == 200


def test_list_without_orders_says_so(client: Client) -> None:
    assert "No orders yet." in client.get("/").content.decode()


def test_unknown_order_is_not_found(client: Client) -> None:
    response = client.get("/orders/7/")
    assert response.status_code == 404
    assert "There is no such page here." in response.content.decode()


@pytest.mark.parametrize("path", ["/", "/orders/new/"])
def test_pages_carry_their_style(client: Client, path: str) -> None:
    assert "/static/shop/shop.css" in client.get(path).content.decode()
    with closing(client.get("/static/shop/shop.css")) as style:
        assert style.status_code == 200


def test_health_is_told_without_the_database(
    client: Client, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    with django_assert_num_queries(0):
        response = client.get("/healthz")
    assert (response.status_code, response.content) == (200, b"ok")


# The mails


def test_mails_are_listed_with_their_headers(client: Client, mails: Path) -> None:
    page = client.get("/mails/").content.decode()
    for text in (
        "Your &lt;receipt&gt;",
        "To ada@example.com",
        "From Paper &amp; Ink &lt;receipts@shop.example&gt;",
        "&lt;1@receipts.shop.example&gt;",
    ):
        assert text in page


def test_mail_is_shown_where_it_can_do_nothing(client: Client, mails: Path) -> None:
    (file,) = mails.iterdir()
    response = client.get(f"/mails/{file.name}/")
    page = response.content.decode()
    assert '<iframe class="card" sandbox ' in page
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "In words" in page
    assert "default-src 'none'" in response["Content-Security-Policy"]


@pytest.mark.parametrize("name", ["..%2Fsecret.eml", "%2Fetc%2Fpasswd", "secret.eml", "*.eml"])
def test_only_mails_of_the_folder_are_shown(client: Client, mails: Path, name: str) -> None:
    assert client.get(f"/mails/{name}/").status_code == 404


def test_folder_that_does_not_exist_yet_has_no_mails(
    client: Client, settings: Settings, tmp_path: Path
) -> None:
    settings.SHOP_MAIL_FOLDER = tmp_path / "later"
    assert "No mails yet." in client.get("/mails/").content.decode()


@pytest.mark.parametrize("path", ["/mails/", "/mails/000001-1@receipts.shop.example.eml/"])
def test_shop_without_a_mail_folder_has_no_mails_page(
    client: Client, settings: Settings, path: str
) -> None:
    settings.SHOP_MAIL_FOLDER = None
    assert client.get(path).status_code == 404
    assert 'href="/mails/"' not in client.get("/").content.decode()

"""The receipt: what the mail says, what the task promises, and the mail server of this project."""

from __future__ import annotations

import email
import smtplib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from decimal import Decimal
from email import policy
from email.message import EmailMessage
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from django.db import OperationalError

from outbox.models import OutboxEntry
from outbox.states import FINAL, State
from receipts.destination import CannotListen
from receipts.mail import receipt_message
from receipts.progress import describe, progress_of
from receipts.smtp import MailDestination
from receipts.tasks import PASSING, UnknownOrder, send_receipt
from shop.models import Order, OrderLine
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pytest_django import Settings

JOB = "01890a5d-ac96-774b-bcce-b302099a8057"


@pytest.fixture
def destination() -> Iterator[MailDestination]:
    with MailDestination(always_accept=["owner@shop.example"]) as destination:
        yield destination


@pytest.fixture
def outgoing(settings: Settings, destination: MailDestination) -> MailDestination:
    """The destination, as the one that Django sends its mails to."""
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.EMAIL_HOST, settings.EMAIL_PORT = destination.host, destination.port
    return destination


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


@pytest.fixture
def order(db: None) -> Order:
    order = Order.objects.create(email="ada@example.com")
    for product, quantity, price in [("Ink <blue>", 2, "14.00"), ("Notebook", 99, "12.50")]:
        OrderLine.objects.create(
            order=order, product=product, quantity=quantity, unit_price=Decimal(price)
        )
    return order


def deliver(
    destination: MailDestination, *to: str, message_id: str = "<1@x.example>", timeout: float = 30
) -> None:
    """Send a mail over a connection of its own, as any mail client would."""
    mail = EmailMessage()
    mail["From"], mail["To"], mail["Subject"] = "a@x.example", ", ".join(to), "Grüße"
    mail["Message-ID"] = message_id
    mail.set_content("Hello")
    with smtplib.SMTP(destination.host, destination.port, timeout=timeout) as client:
        client.send_message(mail)


def deliver_to_a_server_that_hangs(
    destination: MailDestination, *, clients: ThreadPoolExecutor
) -> Future[None]:
    destination.behave("hang")
    sending = clients.submit(deliver, destination, "ada@example.com")
    wait_until(lambda: destination.hanging)
    return sending


# The mail


def test_receipt_lists_every_line_and_the_total_in_both_parts(order: Order) -> None:
    mail = receipt_message(order, job_id=JOB)
    html = str(mail.alternatives[0][0])
    assert "2 × Ink <blue>, €14.00 each: €28.00" in mail.body
    assert "99 × Notebook, €12.50 each: €1,237.50" in mail.body
    assert "Total: €1,265.50" in mail.body
    assert "2 × Ink &lt;blue&gt;" in html
    assert "€1,265.50" in html


def test_receipt_goes_to_the_customer_under_an_id_made_of_the_job(order: Order) -> None:
    message = receipt_message(order, job_id=JOB).message()
    assert message["To"] == "ada@example.com"
    assert message["Subject"] == f"Your receipt for order {order.pk}"
    assert message.get_all("Message-ID") == [f"<{JOB}@receipts.shop.example>"]


def test_receipt_that_is_sent_again_is_the_same_mail(order: Order) -> None:
    first, again = (receipt_message(order, job_id=JOB).message() for _ in range(2))
    for header in ("Message-ID", "Date", "From", "To", "Subject"):
        assert first.get_all(header) == again.get_all(header)
        assert len(first.get_all(header, [])) == 1


# The task


def test_task_delivers_the_receipt_under_its_own_id(
    order: Order, outgoing: MailDestination
) -> None:
    send_receipt.apply((order.pk,), task_id=JOB).get()
    (mail,) = outgoing.received
    assert mail.message_id == f"<{JOB}@receipts.shop.example>"
    assert mail.recipients == ("ada@example.com",)
    content = email.message_from_bytes(mail.raw, policy=policy.default)
    assert {part.get_content_type() for part in content.iter_parts()} == {
        "text/plain",
        "text/html",
    }


@pytest.mark.django_db
def test_order_that_does_not_exist_fails_in_clear_words(outgoing: MailDestination) -> None:
    result = send_receipt.apply((7,), task_id=JOB)
    assert isinstance(result.result, UnknownOrder)
    assert "There is no order 7" in str(result.result)
    assert outgoing.received == []


@pytest.mark.parametrize(
    "error", [smtplib.SMTPRecipientsRefused, ConnectionRefusedError, TimeoutError, OperationalError]
)
def test_what_passes_by_itself_is_tried_again(error: type[Exception]) -> None:
    assert issubclass(error, PASSING)


def test_missing_order_is_not_tried_again() -> None:
    assert not issubclass(UnknownOrder, PASSING)


# Its progress


@pytest.mark.parametrize("state", State)
def test_every_state_has_words_and_stays_open_until_it_is_final(state: State) -> None:
    progress = describe(OutboxEntry(status=state, failures=0, finished_at=datetime.now(UTC)))
    assert progress.sentence
    assert progress.open == (state not in FINAL)


def test_sent_receipt_says_when() -> None:
    entry = OutboxEntry(status=State.SUCCEEDED, finished_at=datetime(2026, 3, 1, 9, 5, tzinfo=UTC))
    assert describe(entry).sentence == "Your receipt was sent on 1 March 2026, 09:05 UTC."


def test_receipt_that_failed_once_is_called_delayed() -> None:
    assert describe(OutboxEntry(status=State.PENDING, failures=1)).word == "delayed"


@pytest.mark.django_db
def test_receipt_without_a_record_is_archived() -> None:
    job = uuid4()
    assert {progress.word for progress in progress_of([job, None]).values()} == {"archived"}


# The mail server


def test_accepted_mail_is_recorded(destination: MailDestination) -> None:
    before = datetime.now(UTC)
    deliver(destination, "ada@example.com", "bob@example.com", message_id="<7@x.example>")
    (mail,) = destination.received
    assert mail.message_id == "<7@x.example>"
    assert mail.recipients == ("ada@example.com", "bob@example.com")
    assert mail.subject == "Grüße"
    assert before <= mail.at <= datetime.now(UTC)
    assert b"Hello" in mail.raw


def test_mails_become_files_that_a_second_server_adds_to(tmp_path: Path) -> None:
    for number in (1, 2):
        with MailDestination(folder=tmp_path / "mails") as destination:
            deliver(destination, "ada@example.com", message_id=f"<../{number}@x.example>")
    assert [file.name for file in sorted((tmp_path / "mails").iterdir())] == [
        "000001-.._1@x.example.eml",
        "000002-.._2@x.example.eml",
    ]


def test_refusal_spares_who_is_always_accepted(destination: MailDestination) -> None:
    destination.behave("refuse")
    with pytest.raises(smtplib.SMTPRecipientsRefused):
        deliver(destination, "ada@example.com")
    deliver(destination, "owner@shop.example")
    assert [mail.recipients for mail in destination.received] == [("owner@shop.example",)]


def test_refusal_ends_when_the_server_behaves_again(destination: MailDestination) -> None:
    destination.behave("refuse")
    destination.behave("ok")
    deliver(destination, "ada@example.com")
    assert len(destination.received) == 1


def test_hanging_server_never_answers(destination: MailDestination) -> None:
    destination.behave("hang")
    with pytest.raises(smtplib.SMTPServerDisconnected, match="timed out"):
        deliver(destination, "ada@example.com", timeout=0.2)
    assert destination.received == []


def test_hanging_server_answers_who_is_always_accepted(destination: MailDestination) -> None:
    destination.behave("hang")
    deliver(destination, "owner@shop.example")
    assert len(destination.received) == 1


def test_hanging_mail_is_accepted_once_the_server_behaves_again(
    destination: MailDestination, clients: ThreadPoolExecutor
) -> None:
    sending = deliver_to_a_server_that_hangs(destination, clients=clients)
    assert destination.received == []
    destination.behave("ok")
    sending.result(timeout=15)
    assert len(destination.received) == 1


def test_hanging_mail_can_be_refused_in_the_end(
    destination: MailDestination, clients: ThreadPoolExecutor
) -> None:
    sending = deliver_to_a_server_that_hangs(destination, clients=clients)
    destination.behave("refuse")
    with pytest.raises(smtplib.SMTPDataError):
        sending.result(timeout=15)


def test_mail_whose_client_went_away_was_not_accepted(destination: MailDestination) -> None:
    destination.behave("hang")
    with pytest.raises(smtplib.SMTPServerDisconnected):
        deliver(destination, "ada@example.com", timeout=0.2)
    wait_until(lambda: not destination.hanging)
    destination.behave("ok")
    deliver(destination, "ada@example.com", message_id="<2@x.example>")
    assert [mail.message_id for mail in destination.received] == ["<2@x.example>"]


def test_stopping_hangs_up_on_a_client_that_hangs(clients: ThreadPoolExecutor) -> None:
    with MailDestination() as destination:
        sending = deliver_to_a_server_that_hangs(destination, clients=clients)
    with pytest.raises(smtplib.SMTPServerDisconnected):
        sending.result(timeout=15)
    with pytest.raises(ConnectionRefusedError):
        deliver(destination, "ada@example.com")


def test_server_that_was_stopped_starts_again_at_its_port(clients: ThreadPoolExecutor) -> None:
    destination = MailDestination()
    with destination:
        port = destination.port
        deliver_to_a_server_that_hangs(destination, clients=clients)
    with destination:
        sending = deliver_to_a_server_that_hangs(destination, clients=clients)
        destination.behave("ok")
        sending.result(timeout=15)
    assert destination.port == port
    assert len(destination.received) == 1


def test_taken_port_is_told_in_one_sentence(destination: MailDestination) -> None:
    with (
        pytest.raises(CannotListen, match=rf"^Port {destination.port} on 127.0.0.1 is taken: .*"),
        MailDestination(port=destination.port),
    ):
        pass


def test_unknown_behaviour_is_refused(destination: MailDestination) -> None:
    with pytest.raises(ValueError, match="'sulk' is not a behaviour"):
        destination.behave("sulk")  # type: ignore[arg-type]

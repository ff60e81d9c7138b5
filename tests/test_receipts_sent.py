"""A receipt through the ledger: what its sender knows to be undone, and what nobody knows."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from celery.app.trace import build_tracer

from outbox.drill.subject import Placed
from outbox.models import OutboxEffect, OutboxEntry
from outbox.states import State
from receipts.drill import ReceiptSubject
from receipts.provider import MailProvider
from receipts.smtp import MailDestination
from receipts.tasks import send_receipt
from shop.models import Order
from tests import tasks
from tests.factories import PAST, at, make_entry, reread
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]

APP = tasks.add.app
SHORT = 0.3  # seconds until a client gives up on a server that will not answer


@pytest.fixture
def destination(settings: Settings) -> Iterator[MailDestination]:
    """The mail server, as the one that receipts go to."""
    with MailDestination() as destination:
        by_smtp(settings, port=destination.port)
        yield destination


@pytest.fixture
def provider(settings: Settings) -> Iterator[MailProvider]:
    """The provider, as the one that receipts go to; it can be asked."""
    with MailProvider() as provider:
        by_provider(settings, url=provider.url)
        yield provider


@pytest.fixture
def owed() -> OutboxEntry:
    order = Order.objects.create(email="ada@example.com")
    order.lines.create(product="Ink", quantity=2, unit_price=Decimal("14.00"))
    return make_entry(
        State.PUBLISHED, task=send_receipt.name, args=[order.pk], owner="tests", failure_limit=3
    )


def by_smtp(settings: Settings, *, port: int) -> None:
    settings.RECEIPTS_BY = "smtp"
    settings.RECEIPTS_WHEN_UNCERTAIN = "park"
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.EMAIL_HOST, settings.EMAIL_PORT = "127.0.0.1", port
    settings.EMAIL_TIMEOUT = SHORT


def by_provider(settings: Settings, *, url: str) -> None:
    settings.RECEIPTS_BY = "provider"
    settings.RECEIPTS_WHEN_UNCERTAIN = "park"
    settings.RECEIPTS_PROVIDER_LOOKUP = True
    settings.RECEIPTS_PROVIDER_URL = url
    settings.RECEIPTS_TIMEOUT = SHORT


def attempt(entry: OutboxEntry) -> OutboxEntry:
    """One delivery of it, in this process; the entry afterwards."""
    OutboxEntry.objects.filter(pk=entry.pk, status=State.PENDING).update(available_at=at(PAST))
    send_receipt.__trace__ = build_tracer(send_receipt.name, send_receipt, app=APP)
    send_receipt.__trace__(str(entry.pk), (), {}, {"id": str(entry.pk)})
    return reread(entry)


def ledger(entry: OutboxEntry) -> str:
    row = OutboxEffect.objects.get(entry=entry, name="mail")
    return "done" if row.done_at else "cleared" if row.cleared_at else "begun"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that answers each connection in that way and then hangs up; its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # closed
                return
            with client:
                client.settimeout(10)
                answer(client)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        with closing(listener):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def smtp_that_says(*replies: str) -> Callable[[socket.socket], None]:
    """A mail server with these replies, in order, to whatever it is told."""

    def answer(client: socket.socket) -> None:
        with client.makefile("rb") as heard:
            for reply in replies:
                client.sendall(f"{reply}\r\n".encode())
                end = b".\r\n" if reply.startswith("354") else b""
                while (line := heard.readline()) and end and line != end:
                    pass

    return answer


def http_that_says(status: str) -> Callable[[socket.socket], None]:
    """A provider with this answer to every request, in no words of its own."""

    def answer(client: socket.socket) -> None:
        with client.makefile("rb") as heard:
            head = b"".join(iter(heard.readline, b"\r\n"))
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            heard.read(int(length or 0))
        client.sendall(f"{status}\r\nContent-Length: 2\r\n\r\n{{}}".encode() if status else b"")

    return answer


# By SMTP


def test_receipt_by_smtp_is_sent_once_and_its_ledger_says_so(
    owed: OutboxEntry, destination: MailDestination
) -> None:
    assert attempt(owed).status == State.SUCCEEDED
    (mail,) = destination.received
    assert mail.message_id == f"<{owed.pk}@receipts.shop.example>"
    effect = OutboxEffect.objects.get(entry=owed)
    assert (ledger(owed), effect.name) == ("done", "mail")
    assert effect.request == {"order": owed.args[0], "to": "ada@example.com", "total": "28.00"}


HELLO = ("220 hello", "250 well met")


@pytest.mark.parametrize(
    "replies",
    [
        (),
        ("554 not here",),
        ("220 hello",),
        ("220 hello", "502 what?", "502 what?"),
        (*HELLO, "450 not from you"),
        (*HELLO, "250 ok", "550 no such mailbox"),
        (*HELLO, "250 ok", "250 ok", "451 no data now"),
        (*HELLO, "250 ok", "250 ok", "354 go on", "452 no room"),
        (*HELLO, "250 ok", "250 ok", "354 go on", "421 closing"),
    ],
)
def test_what_the_mail_server_certainly_did_not_take_is_tried_again(
    owed: OutboxEntry, settings: Settings, replies: tuple[str, ...]
) -> None:
    with serving(smtp_that_says(*replies)) as port:
        by_smtp(settings, port=port)
        entry = attempt(owed)
    assert (entry.status, entry.failures, ledger(owed)) == (State.PENDING, 1, "cleared")


def test_mail_server_that_is_not_there_took_nothing(owed: OutboxEntry, settings: Settings) -> None:
    by_smtp(settings, port=free_port())
    entry = attempt(owed)
    assert (entry.status, ledger(owed)) == (State.PENDING, "cleared")
    assert "ConnectionRefusedError" in entry.error


@pytest.mark.parametrize(
    "replies",
    [
        (*HELLO, "250 ok", "250 ok"),
        (*HELLO, "250 ok", "250 ok", "354 go on"),
        (*HELLO, "250 ok", "250 ok", "354 go on", "taken"),
        (*HELLO, "250 ok", "250 ok", "354 go on", "251 forwarded"),
    ],
)
def test_what_the_mail_server_may_have_taken_is_parked_where_the_settings_say_so(
    owed: OutboxEntry, settings: Settings, replies: tuple[str, ...]
) -> None:
    with serving(smtp_that_says(*replies)) as port:
        by_smtp(settings, port=port)
        entry = attempt(owed)
    assert (entry.status, entry.failures, ledger(owed)) == (State.UNCERTAIN, 0, "begun")


def test_goodbye_that_fails_takes_nothing_back(owed: OutboxEntry, settings: Settings) -> None:
    endless = "2" * 9000  # more than smtplib reads of one line
    taken = (*HELLO, "250 ok", "250 ok", "354 go on", "250 taken", endless)
    with serving(smtp_that_says(*taken)) as port:
        by_smtp(settings, port=port)
        assert attempt(owed).status == State.SUCCEEDED


def test_refused_recipient_is_served_once_the_mail_server_behaves(
    owed: OutboxEntry, destination: MailDestination
) -> None:
    destination.behave("refuse")
    assert attempt(owed).status == State.PENDING
    destination.behave("ok")
    assert attempt(owed).status == State.SUCCEEDED
    assert len(destination.received) == 1


@pytest.mark.parametrize("choice", ["repeat", "park"])
def test_mail_server_that_dies_with_the_mail_in_hand(
    owed: OutboxEntry, settings: Settings, destination: MailDestination, choice: str
) -> None:
    settings.RECEIPTS_WHEN_UNCERTAIN = choice
    settings.EMAIL_TIMEOUT = 30
    destination.behave("hang")
    with ThreadPoolExecutor() as executor:
        dying = executor.submit(die_with_the_mail, destination)
        entry = attempt(owed)
        dying.result(timeout=15)
    assert ledger(owed) == "begun"
    assert entry.status == (State.PENDING if choice == "repeat" else State.UNCERTAIN)
    with destination:
        destination.behave("ok")
        entry = attempt(owed)
    assert entry.status == (State.SUCCEEDED if choice == "repeat" else State.UNCERTAIN)
    sent = [f"<{owed.pk}@receipts.shop.example>"] if choice == "repeat" else []
    assert [mail.message_id for mail in destination.received] == sent


def die_with_the_mail(destination: MailDestination) -> None:
    wait_until(lambda: destination.hanging)
    destination.__exit__(None, None, None)


# By the provider


def test_receipt_by_the_provider_is_the_same_mail_and_keeps_its_id(
    owed: OutboxEntry, provider: MailProvider
) -> None:
    assert attempt(owed).status == State.SUCCEEDED
    (mail,) = provider.received
    assert mail.message_id == f"<{owed.pk}@receipts.shop.example>"
    assert mail.recipients == ("ada@example.com",)
    assert b"multipart/alternative" in mail.raw
    assert [request.key for request in provider.requests] == [f"{owed.pk}:mail"]
    effect = OutboxEffect.objects.get(entry=owed)
    assert set(effect.result) == {"id"}
    # Until then "not found" means nothing: each step of the call may take the whole timeout.
    assert effect.performer_until is not None
    assert effect.performer_until - effect.first_begun_at >= 3 * timedelta(seconds=SHORT)


def test_silent_provider_is_asked_and_nothing_is_sent_twice(
    owed: OutboxEntry, provider: MailProvider
) -> None:
    provider.behave("silent")
    entry = attempt(owed)
    assert (entry.status, entry.failures, ledger(owed)) == (State.PENDING, 1, "begun")
    assert attempt(owed).status == State.SUCCEEDED
    assert (len(provider.received), len(provider.requests)) == (1, 1)
    assert OutboxEffect.objects.get(entry=owed).settled_by == "verify"


def test_hanging_provider_is_given_its_time_and_then_asked_again(
    owed: OutboxEntry, provider: MailProvider
) -> None:
    provider.behave("hang")
    assert attempt(owed).failures == 1
    wait_until(lambda: not provider.hanging)
    provider.behave("ok")
    OutboxEffect.objects.update(performer_until=at(-PAST))
    waits = attempt(owed)
    assert (waits.status, waits.failures, waits.releases) == (State.PENDING, 1, 1)
    assert len(provider.requests) == 1
    OutboxEffect.objects.update(performer_until=at(PAST))
    assert attempt(owed).status == State.SUCCEEDED
    assert (len(provider.received), len(provider.requests)) == (1, 2)


def test_provider_that_cannot_be_asked_is_sent_the_same_again_under_the_same_key(
    owed: OutboxEntry, settings: Settings, provider: MailProvider
) -> None:
    settings.RECEIPTS_PROVIDER_LOOKUP = False
    settings.RECEIPTS_WHEN_UNCERTAIN = "repeat"
    provider.behave("silent")
    assert attempt(owed).status == State.PENDING
    provider.behave("ok")
    assert attempt(owed).status == State.SUCCEEDED
    assert [request.key for request in provider.requests] == [f"{owed.pk}:mail"] * 2
    assert len(provider.received) == 1


def test_provider_that_cannot_be_asked_leaves_it_to_a_person_where_the_settings_say_so(
    owed: OutboxEntry, settings: Settings, provider: MailProvider
) -> None:
    settings.RECEIPTS_PROVIDER_LOOKUP = False
    provider.behave("silent")
    assert attempt(owed).status == State.UNCERTAIN
    assert attempt(owed).status == State.UNCERTAIN
    assert len(provider.requests) == 1


def test_receipt_whose_words_changed_meanwhile_was_taken_all_the_same(
    owed: OutboxEntry, settings: Settings, provider: MailProvider
) -> None:
    settings.RECEIPTS_PROVIDER_LOOKUP = False
    settings.RECEIPTS_WHEN_UNCERTAIN = "repeat"
    provider.behave("silent")
    attempt(owed)
    provider.behave("ok")
    settings.DEFAULT_FROM_EMAIL = "Ink & Paper <receipts@shop.example>"
    entry = attempt(owed)
    assert "another message" in entry.error
    assert (entry.failures, ledger(owed)) == (2, "begun")
    settings.RECEIPTS_PROVIDER_LOOKUP = True
    assert attempt(owed).status == State.SUCCEEDED
    assert len(provider.received) == 1


def test_refusing_provider_took_nothing(owed: OutboxEntry, provider: MailProvider) -> None:
    provider.behave("refuse")
    entry = attempt(owed)
    assert (entry.status, entry.failures, ledger(owed)) == (State.PENDING, 1, "cleared")
    assert "The provider answered 503: No messages are taken at the moment." in entry.error
    provider.behave("ok")
    assert attempt(owed).status == State.SUCCEEDED
    assert len(provider.received) == 1


def test_provider_that_is_not_there_took_nothing(owed: OutboxEntry, settings: Settings) -> None:
    by_provider(settings, url=f"http://127.0.0.1:{free_port()}")
    entry = attempt(owed)
    assert (entry.status, ledger(owed)) == (State.PENDING, "cleared")
    assert "ConnectionRefusedError" in entry.error


@pytest.mark.parametrize(
    ("status", "known"),
    [
        ("HTTP/1.1 400 Bad Request", "cleared"),
        ("HTTP/1.1 429 Too Many Requests", "cleared"),
        ("HTTP/1.1 409 Conflict", "begun"),
        ("HTTP/1.1 500 Internal Server Error", "begun"),
        ("HTTP/1.1 502 Bad Gateway", "begun"),
        ("HTTP/1.1 504 Gateway Timeout", "begun"),
        ("HTTP/1.1 200 OK", "begun"),
        ("SMTP, sorry", "begun"),
        ("", "begun"),
    ],
)
def test_answer_says_whether_it_may_have_been_taken(
    owed: OutboxEntry, settings: Settings, status: str, known: str
) -> None:
    with serving(http_that_says(status)) as port:
        by_provider(settings, url=f"http://127.0.0.1:{port}/v1")
        entry = attempt(owed)
    assert (entry.status, entry.failures, ledger(owed)) == (State.PENDING, 1, known)


@pytest.mark.parametrize("status", ["404 Not Found", "500 Internal Server Error"])
def test_not_found_counts_only_in_the_providers_own_words(
    owed: OutboxEntry, settings: Settings, provider: MailProvider, status: str
) -> None:
    provider.behave("silent")
    attempt(owed)
    OutboxEffect.objects.update(performer_until=at(PAST))
    with serving(http_that_says(f"HTTP/1.1 {status}")) as port:
        by_provider(settings, url=f"http://127.0.0.1:{port}")
        entry = attempt(owed)
    assert (entry.status, entry.failures, ledger(owed)) == (State.PENDING, 2, "begun")


def test_token_goes_with_every_request(owed: OutboxEntry, settings: Settings) -> None:
    heard: list[bytes] = []

    def answer(client: socket.socket) -> None:
        heard.append(client.recv(65_536))
        client.sendall(b'HTTP/1.1 202 Accepted\r\nContent-Length: 10\r\n\r\n{"id":"1"}')

    settings.RECEIPTS_PROVIDER_TOKEN = "secret"
    with serving(answer) as port:
        by_provider(settings, url=f"http://127.0.0.1:{port}/v1")
        attempt(owed)
    assert heard[0].startswith(b"POST /v1/messages HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret\r\n" in heard[0]


# In the drill


@pytest.mark.parametrize("kind", ["", *ReceiptSubject.kinds])
def test_subject_sees_a_receipt_whichever_way_it_takes(
    owed: OutboxEntry, settings: Settings, kind: str
) -> None:
    subject, placed = ReceiptSubject(), Placed(reference="ada@example.com")
    env: dict[str, str] = {}
    subject.start(env)
    try:
        given: dict[str, Any] = {**subject.settings, **(subject.kinds[kind] if kind else {})}
        given |= env | {"EMAIL_PORT": int(env["EMAIL_PORT"])}
        for name in given.keys() - {"CELERY_TASK_ANNOTATIONS"}:
            setattr(settings, name, given[name])
        assert attempt(owed).status == State.SUCCEEDED
        assert [effect.key for effect in subject.effects(placed)] == [
            f"<{owed.pk}@receipts.shop.example>"
        ]
        assert subject.requests(placed) == (settings.RECEIPTS_BY == "provider")
        assert subject.hanging() == 0
    finally:
        subject.cleanup()


def test_subject_can_be_silent(owed: OutboxEntry, settings: Settings) -> None:
    subject, placed = ReceiptSubject(), Placed(reference="ada@example.com")
    env: dict[str, str] = {}
    subject.start(env)
    try:
        by_provider(settings, url=env["RECEIPTS_PROVIDER_URL"])
        subject.destination("silent")
        assert attempt(owed).status == State.PENDING
        assert (len(subject.effects(placed)), subject.requests(placed)) == (1, 1)
        wait_until(lambda: subject.hanging() == 0)
    finally:
        subject.cleanup()

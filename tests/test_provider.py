"""The provider of this project: what it accepts, what it knows again, how it fails to answer."""

from __future__ import annotations

import json
import smtplib
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from receipts.destination import CannotListen
from receipts.provider import MAX_BODY_BYTES, MailProvider
from receipts.smtp import MailDestination
from tests.waiting import wait_until

MESSAGE = {
    "from": "Paper & Ink <receipts@shop.example>",
    "to": ["ada@example.com"],
    "subject": "Grüße",
    "text": "In words",
    "html": "<p>In words</p>",
    "headers": {"Message-ID": "<1@x.example>"},
}
Answer = tuple[int, dict[str, Any]]


@pytest.fixture
def provider() -> Iterator[MailProvider]:
    with MailProvider() as provider:
        yield provider


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


def post(
    provider: MailProvider,
    message: object = MESSAGE,
    *,
    key: str = "",
    path: str = "/messages",
    timeout: float = 30,
) -> Answer:
    """A message, or the bytes of what is none, over a connection of its own."""
    raw = message if isinstance(message, bytes) else json.dumps(message).encode()
    headers = {"Idempotency-Key": key} if key else {}
    return ask(provider, "POST", path, body=raw, headers=headers, timeout=timeout)


def ask(
    provider: MailProvider, method: str, path: str, *, timeout: float = 30, **more: Any
) -> Answer:
    with closing(HTTPConnection(provider.host, provider.port, timeout=timeout)) as connection:
        connection.request(method, path, **more)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def look_up(provider: MailProvider, key: str) -> Answer:
    return ask(provider, "GET", f"/messages?{urlencode({'key': key})}")


def post_while_it_waits(
    provider: MailProvider, *, clients: ThreadPoolExecutor, mode: Any = "hang"
) -> Future[Answer]:
    provider.behave(mode)
    sending = clients.submit(post, provider, key="k")
    wait_until(lambda: provider.hanging)
    return sending


# What it accepts


def test_accepted_message_is_a_mail(provider: MailProvider) -> None:
    before = datetime.now(UTC)
    status, answer = post(provider)
    assert status == 202
    assert answer["id"]
    (mail,) = provider.received
    assert mail.message_id == "<1@x.example>"
    assert mail.recipients == ("ada@example.com",)
    assert mail.subject == "Grüße"
    assert before <= mail.at <= datetime.now(UTC)
    assert b"<p>In words</p>" in mail.raw


def test_same_message_under_the_same_key_is_answered_the_same_and_kept_once(
    provider: MailProvider,
) -> None:
    assert post(provider, key="k") == post(provider, key="k")
    assert len(provider.received) == 1
    assert [request.key for request in provider.requests] == ["k", "k"]


def test_messages_without_a_key_or_under_others_are_all_kept(provider: MailProvider) -> None:
    answers = [post(provider, key=key) for key in ("", "", "k", "l")]
    assert len({answer["id"] for _, answer in answers}) == 4
    assert len(provider.received) == 4


def test_another_message_under_the_same_key_is_refused_in_words(provider: MailProvider) -> None:
    post(provider, key="k")
    status, answer = post(provider, MESSAGE | {"text": "In others"}, key="k")
    assert (status, answer["error"]) == (
        409,
        "This key was used for another message. Choose a new key.",
    )
    assert len(provider.received) == 1


def test_it_can_be_asked_for_a_key(provider: MailProvider) -> None:
    key = "a job:mail & more"
    _, accepted = post(provider, key=key)
    (mail,) = provider.received
    found = {"id": accepted["id"], "to": ["ada@example.com"], "at": mail.at.isoformat()}
    assert look_up(provider, key) == (200, found)
    assert look_up(provider, "another")[0] == 404


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"\xff", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (["from", "to", "subject", "text"], "lacks: from, to, subject, text"),
        ({"from": "a@x.example", "subject": "Hello"}, "lacks: to, text"),
        (MESSAGE | {"to": "ada@example.com"}, "list of addresses"),
        (MESSAGE | {"to": []}, "list of addresses"),
        (MESSAGE | {"to": [7]}, "list of addresses"),
        (MESSAGE | {"text": None}, "is a text"),
        (MESSAGE | {"headers": ["Date"]}, "maps names to values"),
        (MESSAGE | {"headers": {"Date": 7}}, "is a text"),
        (MESSAGE | {"subject": "Hello\nBcc: eve@x.example"}, "cannot be made into a mail"),
        (MESSAGE | {"text": "\ud800"}, "cannot be made into a mail"),
    ],
)
def test_what_is_no_message_is_refused_in_words(
    provider: MailProvider, message: object, words: str
) -> None:
    status, answer = post(provider, message, key="k")
    assert status == 400
    assert words in answer["error"]
    assert provider.received == []
    assert look_up(provider, "k")[0] == 404


def test_huge_message_is_refused_in_words(provider: MailProvider) -> None:
    status, answer = post(provider, b"x" * (20 * MAX_BODY_BYTES))
    assert (status, "at most" in answer["error"]) == (413, True)
    assert (provider.received, provider.requests) == ([], [])


@pytest.mark.parametrize("length", [None, "many", "-1", "²"])
def test_message_of_unknown_length_is_refused(provider: MailProvider, length: str | None) -> None:
    with closing(HTTPConnection(provider.host, provider.port, timeout=30)) as connection:
        connection.putrequest("POST", "/messages")
        if length is not None:
            connection.putheader("Content-Length", length.encode())
        connection.endheaders()
        assert connection.getresponse().status == 411


def test_other_addresses_are_unknown(provider: MailProvider) -> None:
    assert post(provider, path="/mails")[0] == 404
    assert ask(provider, "GET", "/mails?key=k")[0] == 404
    assert ask(provider, "GET", "/messages")[0] == 400


def test_client_that_leaves_in_the_middle_has_sent_nothing(provider: MailProvider) -> None:
    with socket.create_connection((provider.host, provider.port)) as client:
        client.sendall(b"POST /messages HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""
    assert (provider.received, provider.requests) == ([], [])


def test_accepted_message_is_a_file_beside_those_of_the_mail_server(tmp_path: Path) -> None:
    with MailDestination(folder=tmp_path) as smtp, MailProvider(folder=tmp_path) as provider:
        post(provider, key="k")
        with smtplib.SMTP(smtp.host, smtp.port, timeout=30) as client:
            client.sendmail("a@x.example", "b@x.example", "Message-ID: <2@x.example>\n\nHello")
        post(provider, key="l")
    assert [file.name for file in sorted(tmp_path.iterdir())] == [
        "000001-1@x.example.eml",
        "000002-2@x.example.eml",
        "000003-1@x.example.eml",
    ]


# How it fails to


def test_refusal_takes_nothing_and_ends(provider: MailProvider) -> None:
    provider.behave("refuse")
    status, answer = post(provider, key="k")
    assert (status, "Try again later" in answer["error"]) == (503, True)
    assert look_up(provider, "k")[0] == 404
    provider.behave("ok")
    assert post(provider, key="k")[0] == 202
    assert len(provider.received) == 1
    assert len(provider.requests) == 2


def test_hanging_provider_keeps_nothing_and_never_answers(provider: MailProvider) -> None:
    provider.behave("hang")
    with pytest.raises(TimeoutError):
        post(provider, key="k", timeout=0.2)
    assert provider.received == []
    assert look_up(provider, "k")[0] == 404
    assert [request.to for request in provider.requests] == [("ada@example.com",)]


def test_hanging_message_is_accepted_once_the_provider_behaves_again(
    provider: MailProvider, clients: ThreadPoolExecutor
) -> None:
    sending = post_while_it_waits(provider, clients=clients)
    assert provider.received == []
    provider.behave("ok")
    assert sending.result(timeout=15)[0] == 202
    assert len(provider.received) == 1


def test_hanging_message_can_be_refused_in_the_end(
    provider: MailProvider, clients: ThreadPoolExecutor
) -> None:
    sending = post_while_it_waits(provider, clients=clients)
    provider.behave("refuse")
    assert sending.result(timeout=15)[0] == 503
    assert provider.received == []


def test_message_whose_client_went_away_was_not_accepted(provider: MailProvider) -> None:
    provider.behave("hang")
    with pytest.raises(TimeoutError):
        post(provider, key="k", timeout=0.2)
    wait_until(lambda: not provider.hanging)
    provider.behave("ok")
    assert look_up(provider, "k")[0] == 404


def test_silent_provider_keeps_the_message_and_never_answers(
    provider: MailProvider, clients: ThreadPoolExecutor
) -> None:
    sending = post_while_it_waits(provider, clients=clients, mode="silent")
    assert len(provider.received) == 1
    assert look_up(provider, "k")[0] == 200
    provider.behave("ok")
    _, again = post(provider, key="k")
    assert look_up(provider, "k")[1]["id"] == again["id"]
    assert len(provider.received) == 1
    assert not sending.done()
    provider.__exit__(None, None, None)
    with pytest.raises((HTTPException, OSError)):
        sending.result(timeout=15)


def test_same_message_from_many_at_once_is_kept_once(
    provider: MailProvider, clients: ThreadPoolExecutor
) -> None:
    provider.behave("hang")
    sending = [clients.submit(post, provider, key="k") for _ in range(4)]
    wait_until(lambda: provider.hanging == len(sending))
    provider.behave("ok")
    assert len({one.result(timeout=15)[1]["id"] for one in sending}) == 1
    assert len(provider.received) == 1


def test_stopping_hangs_up_on_a_client_that_hangs(clients: ThreadPoolExecutor) -> None:
    with MailProvider() as provider:
        sending = post_while_it_waits(provider, clients=clients)
    with pytest.raises((HTTPException, OSError)):
        sending.result(timeout=15)
    with pytest.raises(ConnectionRefusedError):
        post(provider)
    assert (provider.received, provider.hanging) == ([], 0)


def test_stopping_hangs_up_on_a_client_that_says_nothing() -> None:
    with (
        MailProvider() as provider,
        socket.create_connection((provider.host, provider.port)) as client,
    ):
        client.settimeout(15)
        post(provider)  # answered, so the silent one before it has been met
        provider.__exit__(None, None, None)
        assert client.recv(1) == b""


def test_provider_that_was_stopped_starts_again_at_its_port_and_knows_its_keys() -> None:
    provider = MailProvider()
    with provider:
        port, accepted = provider.port, post(provider, key="k")
    with provider:
        assert look_up(provider, "k")[0] == 200
        assert post(provider, key="k") == accepted
    assert provider.port == port
    assert len(provider.received) == 1


def test_taken_port_is_told_in_one_sentence(provider: MailProvider) -> None:
    with (
        pytest.raises(CannotListen, match=rf"^Port {provider.port} on 127.0.0.1 is taken: .*"),
        MailProvider(port=provider.port),
    ):
        pass


def test_unknown_behaviour_is_refused(provider: MailProvider) -> None:
    with pytest.raises(ValueError, match="'sulk' is not a behaviour"):
        provider.behave("sulk")  # type: ignore[arg-type]

"""A real HTTP server in the shape of an e-mail provider, for drill, demo and tests.

POST /messages           Idempotency-Key: …    202 {"id": …}, and the same again for that key
GET  /messages?key=…                           200 {"id": …, "to": …, "at": …}, or 404
"""

from __future__ import annotations

import json
import select
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.message import EmailMessage
from email.policy import SMTP
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

from receipts.destination import MailFolder, Received, listen, received_mail

Mode = Literal["ok", "refuse", "hang", "silent"]
Answer = tuple[int, dict[str, Any]]

MAX_BODY_BYTES = 1_000_000
MAX_DRAINED_BYTES = 64 * MAX_BODY_BYTES
LOOK_SECONDS = 0.05  # how often a request that waits looks whether its client is still there
IDLE_SECONDS = 30  # a client that sends only half of its request is hung up on
REQUIRED = ("from", "to", "subject", "text")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A POST that arrived whole, whatever became of it; `to` is empty where it was garbage."""

    key: str
    to: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Message:
    id: str
    body: Mapping[str, Any]
    mail: Received


class _Wrong(ValueError):
    """What was sent is no message; the text says why."""


class MailProvider:
    """A provider in threads of this process; use it as a context manager, also repeatedly.

    It keeps every message that it accepts in `received`, and as a file in `folder` where one is
    given. Port 0 takes a free one; a second start takes it again, and remembers every key.

    Raises CannotListen where the port is taken.
    """

    def __init__(
        self, *, folder: Path | None = None, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.host = host
        self.port = port
        self._folder = MailFolder(folder) if folder else None
        self._mode: Mode = "ok"
        self._changed = threading.Condition()  # guards all below
        self._messages: list[_Message] = []
        self._by_key: dict[str, _Message] = {}
        self._requests: list[Request] = []
        self._hanging = 0
        self._stopped = True
        self._server: _Server | None = None

    def __enter__(self) -> Self:
        self._server = _Server(self, listener=listen(self.host, port=self.port))
        self.port = self._server.server_address[1]
        self._stopped = False
        threading.Thread(target=self._server.serve_forever, args=(LOOK_SECONDS,)).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._server is not None:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            self._server.hang_up()
            self._server = None

    @property
    def url(self) -> str:
        """What `/messages` is appended to."""
        return f"http://{self.host}:{self.port}"

    @property
    def received(self) -> list[Received]:
        """What was accepted so far, in order; a copy, from any thread."""
        with self._changed:
            return [message.mail for message in self._messages]

    @property
    def requests(self) -> list[Request]:
        """Every POST that arrived whole, in order: also what was refused, hung or came again."""
        with self._changed:
            return list(self._requests)

    @property
    def hanging(self) -> int:
        """How many requests were taken whole and wait for an answer now."""
        return self._hanging

    def behave(self, mode: Mode) -> None:
        """Change how messages are answered, from now on and for those that hang; any thread.

        ok: accept. refuse: take nothing (503). hang: take the whole request, keep nothing, and
        answer only when the mode changes, unless the client went away meanwhile. silent: keep the
        message, and never answer. Whoever asks for a key is answered in every mode.
        """
        if mode not in get_args(Mode):
            raise ValueError(f"{mode!r} is not a behaviour; choose one of {get_args(Mode)}.")
        with self._changed:
            self._mode = mode
            self._changed.notify_all()

    # What follows runs in the threads of requests.

    def accept(self, raw: bytes, *, key: str, client: socket.socket) -> Answer | None:
        """The answer to a POST; None where it gets none."""
        try:
            body, wrong = _message_in(raw), ""
        except _Wrong as error:
            body, wrong = {}, str(error)
        with self._changed:
            self._requests.append(Request(key=key, to=tuple(body.get("to", ()))))
            if not self._may_be_answered(client):
                return None
            if self._mode == "refuse":
                return 503, {"error": "No messages are taken at the moment. Try again later."}
            answer = (400, {"error": wrong}) if wrong else self._keep(body, key=key)
            if self._mode == "silent":
                self._wait_until_it_leaves(client)
                return None
            return answer

    def look_up(self, key: str) -> Answer:
        """The answer to a GET."""
        with self._changed:
            found = self._by_key.get(key)
        if found is None:
            return 404, {"error": "No message was accepted under this key."}
        at = found.mail.at.isoformat()
        return 200, {"id": found.id, "to": list(found.mail.recipients), "at": at}

    def _may_be_answered(self, client: socket.socket) -> bool:
        if self._mode == "hang":
            with self._counted():
                while self._mode == "hang" and not self._stopped and not _has_left(client):
                    self._changed.wait(LOOK_SECONDS)
        return not self._stopped and not _has_left(client)

    def _wait_until_it_leaves(self, client: socket.socket) -> None:
        with self._counted():
            while not self._stopped and not _has_left(client):
                self._changed.wait(LOOK_SECONDS)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._hanging += 1
        try:
            yield
        finally:
            self._hanging -= 1

    def _keep(self, body: Mapping[str, Any], *, key: str) -> Answer:
        before = self._by_key.get(key) if key else None
        if before is not None and before.body != body:
            return 409, {"error": "This key was used for another message. Choose a new key."}
        message = before or self._new(body, key=key)
        return 202, {"id": message.id}

    def _new(self, body: Mapping[str, Any], *, key: str) -> _Message:
        mail = received_mail(_eml(body), recipients=body["to"])
        message = _Message(id=uuid4().hex, body=body, mail=mail)
        if self._folder is not None:
            self._folder.keep(mail)
        self._messages.append(message)
        if key:
            self._by_key[key] = message
        return message


class _Server(ThreadingHTTPServer):
    """Serves on a socket that is listening already, and knows whom to hang up on."""

    daemon_threads = False  # so that closing waits for the threads: none outlives the server

    def __init__(self, provider: MailProvider, *, listener: socket.socket) -> None:
        super().__init__((provider.host, provider.port), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_address = listener.getsockname()
        self.provider = provider
        self._open: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that goes away is no news; anything else is, and is printed.
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def hang_up(self) -> None:
        self.shutdown()
        for client in list(self._open):
            with suppress(OSError):  # it left by itself
                client.shutdown(socket.SHUT_RDWR)
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = IDLE_SECONDS
    server_version, sys_version = "MailProvider", ""

    def do_POST(self) -> None:  # http.server calls it by this name
        if urlsplit(self.path).path != "/messages":
            return self._say(404, {"error": "There is only /messages."})
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            return self._say(411, {"error": "Content-Length says how long the message is."})
        if int(length) > MAX_BODY_BYTES:
            self._drain(int(length))
            return self._say(413, {"error": f"A message has at most {MAX_BODY_BYTES} bytes."})
        raw = self.rfile.read(int(length))
        if len(raw) < int(length):
            return None  # the client went away before it had said all
        key = self.headers.get("Idempotency-Key", "")
        answer = self.server.provider.accept(raw, key=key, client=self.connection)
        return self._say(*answer) if answer else None

    def do_GET(self) -> None:
        path = urlsplit(self.path)
        keys = parse_qs(path.query).get("key", [])
        if path.path != "/messages":
            return self._say(404, {"error": "There is only /messages."})
        if len(keys) != 1:
            return self._say(400, {"error": "Ask for one key: /messages?key=…"})
        return self._say(*self.server.provider.look_up(keys[0]))

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the tests' and the drill's output is their own."""

    def _drain(self, length: int) -> None:
        # Closing with bytes unread would reset the connection, and the answer with it.
        left = min(length, MAX_DRAINED_BYTES)
        while left > 0 and (chunk := self.rfile.read(min(left, 65_536))):
            left -= len(chunk)

    def _say(self, status: int, answer: Mapping[str, Any]) -> None:
        raw = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def _has_left(client: socket.socket) -> bool:
    """As far as a socket can tell: it was closed, or broke."""
    if not select.select([client], [], [], 0)[0]:
        return False
    try:
        return not client.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def _message_in(raw: bytes) -> dict[str, Any]:
    """The message in a request's body, which can be made into a mail."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _Wrong("The body is no JSON.") from error
    if not isinstance(body, dict) or (missing := [name for name in REQUIRED if name not in body]):
        names = ", ".join(missing if isinstance(body, dict) else REQUIRED)
        raise _Wrong(f"The message lacks: {names}.")
    _check(body)
    return body


def _check(body: Mapping[str, Any]) -> None:
    to, headers = body["to"], body.get("headers", {})
    if not isinstance(to, list) or not to or not all(isinstance(one, str) for one in to):
        raise _Wrong('"to" is a list of addresses.')
    if not isinstance(headers, dict):
        raise _Wrong('"headers" maps names to values.')
    texts = [body[name] for name in ("from", "subject", "text")]
    texts += [body.get("html", ""), *headers.values()]
    if not all(isinstance(text, str) for text in texts):
        raise _Wrong("Every part of a message is a text.")
    try:
        _eml(body)
    except Exception as error:  # the e-mail package fails in many ways on what is no header
        raise _Wrong(f"This cannot be made into a mail: {error}.") from error


def _eml(body: Mapping[str, Any]) -> bytes:
    mail = EmailMessage(policy=SMTP)
    mail["From"], mail["To"], mail["Subject"] = body["from"], ", ".join(body["to"]), body["subject"]
    for name, value in body.get("headers", {}).items():
        mail[name] = value
    mail.set_content(body["text"])
    if body.get("html"):
        mail.add_alternative(body["html"], subtype="html")
    return mail.as_bytes()

"""What both servers of this project share: the address, a mail that was taken on, its file."""

import email
import errno
import re
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email import policy
from pathlib import Path


class CannotListen(RuntimeError):
    """The address for the mail server is not to be had; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Received:
    """A mail that a server took on: its answer to the client was, or was to be, a yes.

    `message_id` is the header as it stands, in angle brackets; `at` is when it arrived.
    """

    message_id: str
    recipients: tuple[str, ...]
    subject: str
    at: datetime
    raw: bytes


class MailFolder:
    """Keeps mails as `<number>-<message id>.eml`; two servers, and later ones, may share it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def keep(self, mail: Received) -> None:
        """Write the mail whole or not at all."""
        with self._lock:
            self._path.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^\w.@+-]", "_", mail.message_id.strip("<>"), flags=re.ASCII)[:150]
            file = self._path / f"{self._highest_number() + 1:06}-{name}.eml"
            unfinished = file.with_suffix(".part")
            unfinished.write_bytes(mail.raw)
            unfinished.replace(file)

    def _highest_number(self) -> int:
        # Asked each time: the other server may have written since.
        numbers = (file.name.partition("-")[0] for file in self._path.glob("*.eml"))
        return max((int(number) for number in numbers if number.isdigit()), default=0)


def received_mail(raw: bytes, *, recipients: Sequence[str]) -> Received:
    """A mail as it arrives now, with what its own headers say."""
    headers = email.message_from_bytes(raw, policy=policy.default)
    return Received(
        message_id=str(headers.get("Message-ID", "")),
        recipients=tuple(recipients),
        subject=str(headers.get("Subject", "")),
        at=datetime.now(UTC),
        raw=raw,
    )


def listen(host: str, *, port: int) -> socket.socket:
    """A socket that listens there; port 0 takes a free one.

    Raises:
        CannotListen: the address is not to be had.
    """
    try:
        return socket.create_server((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CannotListen(
                f"Port {port} on {host} is taken: stop what listens there, or choose another port."
            ) from error
        raise CannotListen(
            f"Cannot receive mail on {host}:{port}: {error.strerror or error}."
        ) from error

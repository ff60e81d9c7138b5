"""The mails that a local mail server left in a folder, for people to look at."""

import email
from dataclasses import dataclass
from datetime import UTC, datetime
from email import policy
from email.message import EmailMessage
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Mail:
    """One received mail, as far as a page shows it; `received_at` is when it arrived."""

    name: str
    sender: str
    recipients: str
    subject: str
    message_id: str
    received_at: datetime
    html: str
    text: str


def files(folder: Path) -> list[Path]:
    """All mails in the folder, the latest first. A folder that does not exist has none."""
    # Their names begin with a number that counts up: see receipts.destination.MailFolder.
    return sorted(folder.glob("*.eml"), reverse=True)


def read(file: Path) -> Mail:
    """Read one mail; what it lacks is empty."""
    message = email.message_from_bytes(file.read_bytes(), policy=policy.default)
    return Mail(
        name=file.name,
        sender=_header(message, name="From"),
        recipients=_header(message, name="To"),
        subject=_header(message, name="Subject"),
        message_id=_header(message, name="Message-ID"),
        received_at=datetime.fromtimestamp(file.stat().st_mtime, tz=UTC),
        html=_part(message, kind="html"),
        text=_part(message, kind="plain"),
    )


def _header(message: EmailMessage, *, name: str) -> str:
    return str(message.get(name, ""))


def _part(message: EmailMessage, *, kind: str) -> str:
    part = message.get_body(preferencelist=(kind,))
    return str(part.get_content()) if part else ""

"""What is drilled: a subject places one obligation, and says which effects of it arrived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Protocol
from uuid import UUID

from django.utils.module_loading import import_string

from outbox.drill.errors import DrillError
from outbox.embedded.errors import INSTALL

#: atomic: in the database, with the completion. verified: the receiving side can be asked.
#: keyed: it drops what comes again under the same key. blind: neither.
Kind = Literal["atomic", "verified", "keyed", "blind"]
#: hang: takes it whole, does nothing, and answers only when the mode changes. silent: does it, and
#: never answers.
Mode = Literal["ok", "refuse", "hang", "silent"]

OWNER_ADDRESS = "owner@drill.example"  # where every owner's mail goes during a drill


@dataclass(frozen=True, kw_only=True)
class Placed:
    """What was asked for. `business_id` and `job_id` are None where no answer came back.

    `reference` is chosen before asking, so that the row can be found where the web died.
    """

    reference: str
    business_id: str | None = None
    job_id: UUID | None = None


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One thing that happened at the destination; `key` is what repetitions share."""

    key: str
    at: datetime


class Subject(Protocol):
    """A task of yours, its trigger and its destination. `receipts.drill` is an example.

    Made once for a drill, without arguments. `find` may use Django's models; `place` runs in a
    thread and may not.

    It may also have these, which are asked for by `getattr`:

    `kinds: Mapping[str, Mapping[str, Any]]`: settings on top of `settings`, by a name for each,
        under which the same obligation is met in another way, each through the ledger: "verified",
        "keyed", "repeated" (under its key, at a destination that does not know keys), "parked".
    `requests(placed) -> int`: how many requests for it the destination saw, whatever came of them.
    """

    #: The durable task that is owed, by its name.
    task: str
    #: What `celery -A` takes.
    celery_app: str
    #: What one effect and one business row are called in the report.
    effect: str
    business: str
    kind: Kind
    #: How the receiving side tells a repetition, in a sentence for the report.
    deduplication: str
    #: Settings of the drilled processes on top of the project's own; dicts are merged.
    settings: Mapping[str, Any]

    def start(self, env: dict[str, str]) -> None:
        """Start the destination; add to `env` what the drilled processes need to find it."""

    def place(self, base_url: str) -> Placed:
        """Cause one obligation through the web. A web that dies meanwhile is no error."""

    def find(self, placed: Placed) -> Placed:
        """Complete `placed` from what is committed in the database; None where nothing is."""

    def destination(self, mode: Mode) -> None:
        """How the destination answers from now on. Mails to `OWNER_ADDRESS` pass always.

        One that cannot be silent raises ValueError.
        """

    def hanging(self) -> int | None:
        """How many attempts hang at the destination now; None where this cannot be seen."""

    def effects(self, placed: Placed) -> list[Effect]:
        """All effects of it that the destination has accepted so far."""

    def owner_mails(self, job_id: UUID) -> int | None:
        """How many mails about the job its owner got; None where this cannot be seen."""

    def cleanup(self) -> None:
        """Stop the destination. Called once, however the drill ends, if `start` was."""


def kinds_of(subject: Subject) -> Mapping[str, Mapping[str, Any]]:
    """The settings of each way in which its obligation can be met; empty where it has one."""
    found: Mapping[str, Mapping[str, Any]] = getattr(subject, "kinds", {})
    return found


def requests_of(subject: Subject, placed: Placed) -> int | None:
    """How many requests for it the destination saw; None where this cannot be seen."""
    count = getattr(subject, "requests", None)
    return count(placed) if count else None


def load(path: str) -> Subject:
    """The subject at a dotted path.

    Raises:
        DrillError: there is none.
    """
    try:
        subject: Subject = import_string(path)()
    except ModuleNotFoundError as error:
        hint = INSTALL if error.name == "aiosmtpd" else "name your own with --subject"
        raise DrillError(
            f"The subject {path} cannot be loaded, no module named {error.name!r}: {hint}."
        ) from error
    except (ImportError, TypeError) as error:
        raise DrillError(f"The subject {path} cannot be loaded: {error}.") from error
    return subject

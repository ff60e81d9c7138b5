"""Where a receipt is, in a customer's words."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from django.utils.formats import date_format
from django.utils.timezone import localtime

from outbox.models import OutboxEntry
from outbox.states import WAITING, State

Tone = Literal["waiting", "good", "bad", "quiet"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A word for a list, a sentence for a page; `open` as long as it can still change by itself."""

    word: str
    sentence: str
    tone: Tone
    open: bool = False


SOON = Progress(
    word="on its way", sentence="Your receipt will be sent shortly.", tone="waiting", open=True
)
DELAYED = Progress(
    word="delayed",
    # Not "could not be sent": of a failure without an answer nobody knows that.
    sentence="Your receipt is delayed. We are trying again.",
    tone="waiting",
    open=True,
)
SENDING = Progress(
    word="on its way", sentence="Your receipt is being sent.", tone="waiting", open=True
)
UNCERTAIN = Progress(
    word="being checked",
    sentence="Somebody is checking whether your receipt was sent.",
    tone="waiting",
    open=True,
)
FAILED = Progress(
    word="not sent",
    sentence="Your receipt could not be sent. We have been told, and are looking after it.",
    tone="bad",
)
CANCELLED = Progress(
    word="cancelled", sentence="The receipt for this order was cancelled.", tone="quiet"
)
FORGOTTEN = Progress(
    word="archived", sentence="What became of this receipt is no longer on record.", tone="quiet"
)

BY_STATE = {
    State.PENDING: SOON,
    State.PUBLISHED: SOON,
    State.RUNNING: SENDING,
    State.UNCERTAIN: UNCERTAIN,
    State.FAILED: FAILED,
    State.CANCELLED: CANCELLED,
}


def progress_of(jobs: Iterable[UUID | None]) -> dict[UUID | None, Progress]:
    """The progress of each job, read in one query. A pruned or absent one is `FORGOTTEN`."""
    jobs = list(jobs)
    entries = OutboxEntry.objects.in_bulk([job for job in jobs if job])
    return {job: describe(entries[job]) if job in entries else FORGOTTEN for job in jobs}


def describe(entry: OutboxEntry) -> Progress:
    """The progress of one entry, in whatever state it is."""
    if entry.status == State.SUCCEEDED:
        return _sent(entry)
    if entry.status in WAITING and entry.failures:
        return DELAYED
    return BY_STATE[State(entry.status)]


def _sent(entry: OutboxEntry) -> Progress:
    at = date_format(localtime(entry.finished_at), "j F Y, H:i")
    return Progress(word="sent", sentence=f"Your receipt was sent on {at} UTC.", tone="good")

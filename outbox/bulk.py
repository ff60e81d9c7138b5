"""Retry, cancel and resolve for several entries, and in words what became of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from uuid import UUID

from outbox import transitions
from outbox.events import Note
from outbox.lifecycle.cancel import cancel as cancel_one
from outbox.lifecycle.operate import requeue as requeue_one
from outbox.models import OutboxEntry
from outbox.states import EDGES, State, Verb
from outbox.transitions import Asked


@dataclass(frozen=True)
class Outcome:
    """What became of one entry. `refused` says why it was left as it is; empty: it was done."""

    entry_id: UUID
    refused: str = ""


def requeue(ids: Iterable[UUID], *, actor: str, reason: str = "", using: str) -> list[Outcome]:
    """Owe these entries again, each in a transaction of its own, in the given order."""

    def do(entry_id: UUID) -> bool:
        return requeue_one(entry_id, actor=actor, reason=reason, using=using)

    return [_outcome(entry_id, do, why_not_requeued, using=using) for entry_id in ids]


def cancel(
    ids: Iterable[UUID], *, actor: str, reason: str = "", terminate: bool = False, using: str
) -> list[Outcome]:
    """Cancel these entries, each in a transaction of its own, in the given order."""

    def do(entry_id: UUID) -> bool:
        return cancel_one(entry_id, actor=actor, reason=reason, terminate=terminate, using=using)

    return [_outcome(entry_id, do, why_not_cancelled, using=using) for entry_id in ids]


def resolve(
    ids: Iterable[UUID],
    *,
    happened: bool,
    actor: str,
    reason: str = "",
    asked: Asked | None = None,
    using: str,
) -> list[Outcome]:
    """Say of each what became of the effect that it waits for, or of its last run.

    `asked`: what somebody was asked of it; what has moved since is refused. Without, one that has
    several effects is.
    """
    note = Note(actor, reason)

    def do(entry_id: UUID) -> bool:
        return transitions.resolve_next(
            entry_id, happened=happened, asked=asked, note=note, using=using
        )

    return [_outcome(entry_id, do, why_not_resolved, using=using) for entry_id in ids]


def _outcome(
    entry_id: UUID,
    do: Callable[[UUID], bool],
    why_not: Callable[[OutboxEntry | None], str],
    *,
    using: str,
) -> Outcome:
    if do(entry_id):
        return Outcome(entry_id)
    # Read after the refusal: it may have moved since, but the guard has judged, not this.
    entry = (
        OutboxEntry.objects.using(using)
        .only("status", "lease_owner", "options")
        .filter(pk=entry_id)
    )
    return Outcome(entry_id, why_not(entry.first()))


def why_not_requeued(entry: OutboxEntry | None) -> str:
    """Why a retry of the entry is refused, in words."""
    if entry is None:
        return "no such entry"
    if entry.run_goes_on:
        return "a run still goes on"
    if entry.is_erased:
        return "its contents were erased"
    if entry.status in EDGES[Verb.REQUEUE].sources:
        return "a newer entry holds the unique key"
    if entry.status == State.SUCCEEDED:
        return "succeeded already"
    return f"not ended, but {entry.status}"


def why_not_cancelled(entry: OutboxEntry | None) -> str:
    """Why a cancellation of the entry is refused, in words."""
    if entry is None:
        return "no such entry"
    return f"already ended: {entry.status}"


def why_not_resolved(entry: OutboxEntry | None) -> str:
    """Why a word on the entry is refused, in words."""
    if entry is None:
        return "no such entry"
    if entry.status == State.UNCERTAIN:
        return "it has moved since you looked, or has several effects: answer on its page"
    return f"it waits for nobody's word, but is {entry.status}"

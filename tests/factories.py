"""Entries in a given state, written past the transitions: the CHECK constraints still hold."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from outbox.clock import new_id
from outbox.models import OutboxEffect, OutboxEntry
from outbox.states import FINAL, State

PAST = timedelta(seconds=-60)
AHEAD = timedelta(seconds=60)


def at(delta: timedelta = timedelta()) -> datetime:
    return datetime.now(UTC) + delta


def make_entry(status: State = State.PENDING, **columns: Any) -> OutboxEntry:
    """An entry of `tests.tasks.add(1, 2)`, complete for its state; `columns` override."""
    row: dict[str, Any] = {
        "id": new_id(),
        "task": "tests.tasks.add",
        "args": [1, 2],
        "kwargs": {},
        "status": status.value,
    }
    if status != State.PENDING:
        row |= {"published_at": at(PAST), "publishes": 1}
    if status not in (State.PENDING, State.PUBLISHED):
        row |= {"attempts": 1, "started_at": at(PAST), "claim_token": uuid4()}
    if status == State.RUNNING:
        row |= {"lease_owner": uuid4(), "lease_pid": 4242, "lease_until": at(AHEAD)}
    if status in FINAL:
        row |= {"finished_at": at(PAST)}
    entry = OutboxEntry(**{**row, **columns})
    OutboxEntry.objects.bulk_create([entry])
    return reread(entry)


def reread(entry: OutboxEntry) -> OutboxEntry:
    """The row as it is now."""
    return OutboxEntry.objects.get(pk=entry.pk)


def begin_effect(entry: OutboxEntry, name: str = "mail", **columns: Any) -> OutboxEffect:
    """An outside effect whose outcome nobody knows."""
    return OutboxEffect.objects.create(
        entry=entry, name=name, key=f"{entry.pk}:{name}", begin_token=uuid4(), **columns
    )

"""Rows in a given state, as the library would have left them: the CHECK constraints hold."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from outbox.clock import new_id
from outbox.models import OutboxEntry
from outbox.states import FINAL, State


def ago(**span: float) -> datetime:
    """That long before now: `ago(minutes=5)`."""
    return datetime.now(UTC) - timedelta(**span)


def make_entry(status: State | str = State.PENDING, **columns: Any) -> OutboxEntry:
    """Insert an entry in that state and read it back; `columns` go before what the state needs."""
    (entry,) = make_entries(1, status, **columns)
    return entry


def make_entries(
    count: int, status: State | str = State.PENDING, **columns: Any
) -> list[OutboxEntry]:
    """Insert that many entries alike, in order of their IDs, and read them back."""
    rows = [
        OutboxEntry(
            **{
                "id": new_id(),
                "task": "tests.tasks.add",
                "args": [2, 3],
                "status": State(status),
                **_needed(State(status)),
                **columns,
            }
        )
        for _ in range(count)
    ]
    OutboxEntry.objects.bulk_create(rows)
    return list(OutboxEntry.objects.filter(pk__in=[row.pk for row in rows]).order_by("pk"))


def _needed(status: State) -> dict[str, Any]:
    """What the constraints ask of a row in that state, and what such a row has had behind it."""
    if status is State.PENDING:
        return {}
    published = {"published_at": ago(seconds=2), "publishes": 1}
    if status is State.PUBLISHED:
        return published
    started = {**published, "started_at": ago(seconds=1), "attempts": 1, "claim_token": uuid4()}
    if status is State.RUNNING:
        until = datetime.now(UTC) + timedelta(minutes=1)
        return {**started, "lease_owner": uuid4(), "lease_pid": 4321, "lease_until": until}
    if status in FINAL:
        started["finished_at"] = ago(seconds=0)
    if status is State.FAILED:
        started |= {"failures": 1, "error": "ValueError: no", "traceback": "Traceback …"}
    return started

"""Rows in a given state, as the library would have left them: the CHECK constraints hold."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from outbox.clock import new_id
from outbox.models import OutboxEffect, OutboxEntry, OutboxEvent, OutboxTick
from outbox.states import FINAL, State, Verb

PAST = timedelta(seconds=-60)
AHEAD = timedelta(seconds=60)


def at(delta: timedelta = timedelta()) -> datetime:
    """So far from now."""
    return datetime.now(UTC) + delta


def ago(**span: float) -> datetime:
    """That long before now: `ago(minutes=5)`."""
    return at(-timedelta(**span))


def in_reach_for_long() -> None:
    """Somebody has had the database in reach for more than a lease: sweeps may crash."""
    times = {"last_at": at(), "unbroken_since": at(PAST)}
    OutboxTick.objects.update_or_create(name="contact", defaults=times)


def make_entry(status: State | str = State.PENDING, **columns: Any) -> OutboxEntry:
    """Insert an entry in that state and read it back; `columns` go before what the state needs."""
    (entry,) = make_entries(1, status, **columns)
    return entry


def make_entries(
    count: int, status: State | str = State.PENDING, **columns: Any
) -> list[OutboxEntry]:
    """Insert that many entries alike, in order of their IDs, and read them back."""
    common = {"task": "tests.tasks.add", "args": [1, 2], "status": State(status)}
    rows = [
        OutboxEntry(**{"id": new_id(), **common, **_needed(State(status)), **columns})
        for _ in range(count)
    ]
    OutboxEntry.objects.bulk_create(rows)
    return list(OutboxEntry.objects.filter(pk__in=[row.pk for row in rows]).order_by("pk"))


def reread(entry: OutboxEntry) -> OutboxEntry:
    """The row as it is now."""
    return OutboxEntry.objects.get(pk=entry.pk)


def begin_effect(entry: OutboxEntry, name: str = "mail", **columns: Any) -> OutboxEffect:
    """An outside effect whose outcome nobody knows."""
    return OutboxEffect.objects.create(
        entry=entry, name=name, key=f"{entry.pk}:{name}", begin_token=uuid4(), **columns
    )


def _needed(status: State) -> dict[str, Any]:
    """What the constraints ask of a row in that state, and what such a row has had behind it."""
    if status is State.PENDING:
        return {}
    published = {"published_at": ago(seconds=2), "publishes": 1}
    if status is State.PUBLISHED:
        return published
    started = {**published, "started_at": ago(seconds=1), "attempts": 1, "claim_token": uuid4()}
    if status is State.RUNNING:
        return {**started, "lease_owner": uuid4(), "lease_pid": 4321, "lease_until": at(AHEAD)}
    if status in FINAL:
        started["finished_at"] = ago(seconds=0)
    if status is State.FAILED:
        started |= {"failures": 1, "error": "ValueError: no", "traceback": "Traceback …"}
    return started


def parked(entry: OutboxEntry, *, when: datetime | None = None) -> None:
    """Note of an uncertain entry that it was parked then, or a minute ago."""
    OutboxEvent.objects.create(
        entry=entry, verb=Verb.PARK, from_status=State.RUNNING, to_status=State.UNCERTAIN,
        at=when or at(PAST),
    )  # fmt: skip

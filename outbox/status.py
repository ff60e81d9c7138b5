"""How the outbox is doing: its numbers, and in words what is wrong and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from celery import Celery

from outbox import problems, standing
from outbox.models import OutboxTick
from outbox.problems import Problem
from outbox.standing import Standing, seconds
from outbox.states import FINAL, State

VERSION = 1  # of the JSON; it grows when a key changes its meaning or goes


@dataclass(frozen=True, kw_only=True)
class Queue:
    """The open entries of one queue."""

    name: str
    pending: int = 0
    due: int = 0  # pending, and its time has come
    published: int = 0
    running: int = 0
    oldest_due_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A maintenance tick's last run."""

    name: str
    last_at: datetime | None = None
    duration_seconds: float | None = None
    findings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Status:
    """What `outbox_status` shows; the attributes are the keys of its JSON."""

    version: int
    at: datetime
    healthy: bool
    problems: Sequence[Problem]
    counts: Mapping[str, int]
    queues: Sequence[Queue]
    oldest_unfinished_seconds: float | None
    oldest_published_seconds: float | None
    oldest_uncertain_seconds: float | None  # since it began to wait for a person
    workers: int
    refused: Mapping[str, int]  # deliveries that those workers did not run, by reason
    ticks: Sequence[Tick]

    def as_json(self) -> dict[str, Any]:
        """The same as plain dicts and lists; times in ISO 8601."""
        return _plain(asdict(self))  # type: ignore[no-any-return]


def read(app: Celery, *, using: str) -> Status:
    """Look at the database of that alias, and whether the broker answers.

    Raises:
        DatabaseError, InterfaceError: the database is away.
    """
    facts = standing.read(using=using)
    found = list(problems.of(facts, app=app))
    return Status(
        version=VERSION,
        at=facts.at,
        healthy=not found,
        problems=found,
        counts=_counts(facts),
        queues=list(_queues(facts)),
        oldest_unfinished_seconds=facts.oldest("oldest_owed"),
        oldest_published_seconds=facts.oldest("oldest_published"),
        oldest_uncertain_seconds=_asked_for(facts),
        workers=len(facts.workers),
        refused=dict(sum((Counter(worker.refused) for worker in facts.workers), Counter())),
        ticks=[_tick(tick) for tick in facts.ticks.values()],
    )


def _asked_for(facts: Standing) -> float | None:
    return None if facts.asked_since is None else seconds(facts.at, facts.asked_since)


def _counts(facts: Standing) -> dict[str, int]:
    return {
        state.value: facts.ended[state] if state in FINAL else facts.sum("entries", state)
        for state in State
    }


def _queues(facts: Standing) -> Iterator[Queue]:
    for name in sorted({row["queue"] for row in facts.open}):
        rows = {row["status"]: row for row in facts.open if row["queue"] == name}
        pending = rows.get(State.PENDING, {})
        oldest = pending.get("oldest_due")
        yield Queue(
            name=name,
            pending=pending.get("entries", 0),
            due=pending.get("due", 0),
            published=rows.get(State.PUBLISHED, {}).get("entries", 0),
            running=rows.get(State.RUNNING, {}).get("entries", 0),
            oldest_due_seconds=None if oldest is None else seconds(facts.at, oldest),
        )


def _tick(tick: OutboxTick) -> Tick:
    took = None if tick.duration is None else round(tick.duration.total_seconds(), 3)
    return Tick(name=tick.name, last_at=tick.last_at, duration_seconds=took, findings=tick.findings)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.isoformat() if isinstance(value, datetime) else value

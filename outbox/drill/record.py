"""What the database says of the drilled jobs, read into values that outlive the database."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from outbox.lifecycle.cancel import cancel
from outbox.models import (
    EntryQuerySet,
    OutboxEffect,
    OutboxEntry,
    OutboxEvent,
    OutboxNotice,
    OutboxTick,
)
from outbox.states import FINAL, State
from outbox.ticks import DISPATCH


@dataclass(frozen=True, kw_only=True)
class Event:
    """A step off the plain happy path."""

    verb: str
    at: datetime
    attempt: int
    actor: str
    words: str
    traceback: str
    started_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """A durable record, as it stood when it was read."""

    id: UUID
    task: str = ""
    state: str
    version: int = 0
    queue: str = "celery"
    attempts: int
    failures: int
    crashes: int
    releases: int = 0
    publishes: int
    subject: str
    owner: str
    error: str
    due_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None
    deadline_at: datetime | None = None
    lease_pid: int | None = None
    lease_until: datetime | None
    missing_since: datetime | None = None
    crash_limit: int | None = None
    events: tuple[Event, ...]

    @property
    def written(self) -> tuple[int, str, int]:
        """What a write that is refused leaves as it is."""
        return self.version, self.state, self.attempts

    @property
    def has_ended(self) -> bool:
        return self.state in FINAL

    @property
    def waits_for_a_person(self) -> bool:
        return self.state == State.UNCERTAIN

    def seen(self, verb: str) -> tuple[Event, ...]:
        """Its events of that verb."""
        return tuple(event for event in self.events if event.verb == verb)


def jobs_since(moment: datetime, *, tasks: Collection[str]) -> tuple[Job, ...]:
    """Those tasks' entries that were made after that moment, oldest first."""
    rows = _since(moment, tasks=tasks).prefetch_related("events").order_by("created_at", "pk")
    return tuple(map(_job, rows))


def count(moment: datetime, *, tasks: Collection[str], states: Collection[State]) -> int:
    """How many of them are in those states."""
    return _since(moment, tasks=tasks).filter(status__in=states).count()


def _since(moment: datetime, *, tasks: Collection[str]) -> EntryQuerySet:
    return OutboxEntry.objects.filter(task__in=tasks, created_at__gt=moment)


def owner_is_told(job_id: UUID) -> bool:
    """Whether the job's owner has been sent a message that tells of it."""
    return OutboxNotice.objects.filter(entry=job_id, told_at__isnull=False).exists()


def begun_effects(job_id: UUID) -> list[str]:
    """The names of its effects whose outcome nobody knows, in the order in which they began."""
    begun = OutboxEffect.objects.filter(entry=job_id, done_at=None, cleared_at=None)
    return list(begun.order_by("id").values_list("name", flat=True))


def told_since(moment: datetime, *, tasks: Collection[str]) -> dict[str, int]:
    """Of how many of these entries their owners were told, and by how many messages."""
    rows = OutboxNotice.objects.filter(entry__created_at__gt=moment, entry__task__in=tasks)
    told = rows.filter(told_at__isnull=False)
    messages = rows.values("told_by").distinct()
    return {"failures told": told.count(), "messages": messages.count()}


def jobs(job_ids: Collection[UUID]) -> tuple[Job, ...]:
    """These entries, as they are now."""
    return tuple(map(_job, OutboxEntry.objects.filter(pk__in=job_ids).prefetch_related("events")))


def last_pass(tick: str = DISPATCH) -> datetime | None:
    """When somebody last finished a pass of that tick."""
    found: datetime | None = (
        OutboxTick.objects.filter(name=tick).values_list("last_at", flat=True).first()
    )
    return found


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A pass of a tick: when it began, by the database's clock, and what it found."""

    began: datetime
    ended: datetime
    found: Mapping[str, Any]


def latest_pass(tick: str) -> Pass | None:
    """The last one that ended."""
    last = OutboxTick.objects.filter(name=tick).first()
    if last is None or last.last_at is None or last.duration is None:
        return None
    return Pass(began=last.last_at - last.duration, ended=last.last_at, found=last.findings)


def open_jobs() -> int:
    """How many entries of any task have not ended."""
    return OutboxEntry.objects.unfinished().count()


def cancel_open_jobs() -> None:
    """What a point that failed has left must not walk into the next one."""
    for job_id in OutboxEntry.objects.unfinished().values_list("pk", flat=True):
        cancel(job_id, actor="drill", reason="left by an earlier point")


def _job(entry: OutboxEntry) -> Job:
    return Job(
        id=entry.pk,
        task=entry.task,
        state=str(entry.status),
        version=entry.version,
        queue=entry.queue,
        attempts=entry.attempts,
        failures=entry.failures,
        crashes=entry.crashes,
        releases=entry.releases,
        publishes=entry.publishes,
        subject=entry.subject,
        owner=entry.owner,
        error=entry.error,
        due_at=entry.due_at,
        started_at=entry.started_at,
        finished_at=entry.finished_at,
        deadline_at=entry.deadline_at,
        lease_pid=entry.lease_pid,
        lease_until=entry.lease_until,
        missing_since=entry.missing_since,
        crash_limit=entry.crash_limit,
        events=tuple(map(_event, entry.events.all())),
    )


def _event(event: OutboxEvent) -> Event:
    return Event(
        verb=event.verb,
        at=event.at,
        attempt=event.attempt,
        actor=event.actor,
        words="; ".join(filter(None, (event.error.partition("\n")[0], event.reason))),
        traceback=event.traceback,
        started_at=event.started_at,
    )

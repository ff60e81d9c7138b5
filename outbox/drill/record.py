"""What the database says of the drilled jobs, read into values that outlive the database."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from outbox.lifecycle.cancel import cancel
from outbox.models import OutboxEntry, OutboxEvent, OutboxTick
from outbox.states import FINAL, State
from outbox.ticks import DISPATCH
from outbox.transitions import TELL_OWNER


@dataclass(frozen=True, kw_only=True)
class Event:
    """A step off the plain happy path."""

    verb: str
    attempt: int
    actor: str
    words: str
    traceback: str


@dataclass(frozen=True, kw_only=True)
class Job:
    """A durable record, as it stood when it was read."""

    id: UUID
    state: str
    attempts: int
    failures: int
    crashes: int
    publishes: int
    subject: str
    owner: str
    error: str
    due_at: datetime
    finished_at: datetime | None
    lease_until: datetime | None
    events: tuple[Event, ...]

    @property
    def has_ended(self) -> bool:
        return self.state in FINAL

    @property
    def waits_for_a_person(self) -> bool:
        return self.state == State.UNCERTAIN


def job_ids(task: str) -> frozenset[UUID]:
    """All entries of the task."""
    return frozenset(OutboxEntry.objects.filter(task=task).values_list("pk", flat=True))


def jobs_since(known: Collection[UUID], *, task: str) -> tuple[Job, ...]:
    """The task's entries that are not among the known ones, oldest first."""
    entries = OutboxEntry.objects.filter(task=task).exclude(pk__in=known).order_by("created_at")
    return tuple(_job(entry) for entry in entries)


def owner_is_told(job_id: UUID) -> bool:
    """Whether the message that is owed to the job's owner has been sent."""
    messages = OutboxEntry.objects.filter(task=TELL_OWNER, parent_id=job_id)
    return messages.filter(status=State.SUCCEEDED).exists()


def last_dispatch() -> datetime | None:
    """When a dispatcher last finished a pass."""
    found: datetime | None = (
        OutboxTick.objects.filter(name=DISPATCH).values_list("last_at", flat=True).first()
    )
    return found


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
        state=str(entry.status),
        attempts=entry.attempts,
        failures=entry.failures,
        crashes=entry.crashes,
        publishes=entry.publishes,
        subject=entry.subject,
        owner=entry.owner,
        error=entry.error,
        due_at=entry.due_at,
        finished_at=entry.finished_at,
        lease_until=entry.lease_until,
        events=tuple(map(_event, entry.events.all())),
    )


def _event(event: OutboxEvent) -> Event:
    return Event(
        verb=event.verb,
        attempt=event.attempt,
        actor=event.actor,
        words=event.error.partition("\n")[0] or event.reason,
        traceback=event.traceback,
    )

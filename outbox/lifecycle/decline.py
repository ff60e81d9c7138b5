"""decline: a worker that cannot run a delivery gives it back, for one that can."""

from __future__ import annotations

from enum import Enum
from uuid import UUID

from django.db.models.functions import Now

from outbox import transitions
from outbox.clock import backoff
from outbox.events import Note
from outbox.models import OutboxEntry, OutboxEvent
from outbox.states import State, Verb

FIRST = 1.0  # seconds; doubling, since another worker of the queue may know the task


class Answer(Enum):
    """What the row says of a delivery that this worker cannot run."""

    DECLINED = "declined"  # owed again, a little later; nothing is burnt
    NOT_MARKED = "not marked"  # due, and perhaps just published: its publisher will say so
    STALE = "stale"  # an old copy: the row has moved on
    ALIEN = "alien"  # there is no such entry


def decline(entry_id: UUID, *, reason: str, using: str) -> Answer:
    """Give a published entry back, later each time."""
    rows = OutboxEvent.objects.using(using).filter(entry_id=entry_id, verb=Verb.DECLINE)
    note = Note("worker", reason)
    delay = backoff(rows.count(), first=FIRST)
    if transitions.decline(entry_id, delay=delay, note=note, using=using):
        return Answer.DECLINED
    return _why_not(entry_id, using=using)


def _why_not(entry_id: UUID, *, using: str) -> Answer:
    entry = OutboxEntry.objects.using(using).filter(pk=entry_id)
    if not entry.exists():
        return Answer.ALIEN
    due = entry.filter(status=State.PENDING, available_at__lte=Now())
    return Answer.NOT_MARKED if due.exists() else Answer.STALE

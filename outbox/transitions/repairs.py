"""What dispatcher, clerk and reconcile do to rows that `recovering` holds for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from uuid import UUID

from django.db import connections, transaction
from django.db.models import DateTimeField, DurationField, ExpressionWrapper, F, Value
from django.db.models.functions import Greatest, Least, Now

from outbox.events import Note
from outbox.models import EntryQuerySet, OutboxEntry
from outbox.states import OPEN, State, Verb
from outbox.transitions.jobs import publish
from outbox.transitions.moves import (
    UNLEASED,
    Holder,
    again,
    ended,
    give_up,
    locked,
    move,
    running,
)
from outbox.transitions.notices import gathered, owe_word_to_owners

LOCK_TIMEOUT = "2s"  # a recoverer waits for nobody longer than this
LONGEST_PAUSE = timedelta(minutes=10)  # between two tries of what the broker refuses


@contextmanager
def short_of_patience(*, using: str) -> Iterator[None]:
    """A transaction that waits for nobody's lock longer than `LOCK_TIMEOUT`."""
    with transaction.atomic(using=using), gathered(using=using):
        with connections[using].cursor() as cursor:
            cursor.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
        yield


@contextmanager
def recovering(rows: EntryQuerySet, *, limit: int) -> Iterator[list[OutboxEntry]]:
    """Hold up to `limit` of `rows`, in ID order, skipping what somebody else holds."""
    using = rows.db
    with short_of_patience(using=using):
        locked = rows.using(using).order_by("pk").select_for_update(skip_locked=True, no_key=True)
        yield list(locked[:limit])


@contextmanager
def lost_run(entry_id: UUID, *, holder: Holder, using: str) -> Iterator[OutboxEntry | None]:
    """Hold the run of a child that is gone. None: the row is another's by now, or has ended."""
    with transaction.atomic(using=using):
        yield running(entry_id, Verb.CRASH, holder=holder, using=using)


def crash(
    entry: OutboxEntry, *, delay: timedelta, limit: int, on_crash: str, note: Note
) -> State | None:
    """Count a run whose process died: its lease is past, or its child was seen to be gone.

    Where the entry is then; None: it is no longer as it was read. At the cap it fails;
    `on_crash="park"` asks a person at once, `"fail"` ends it at once.
    """
    counted = {"crashes": F("crashes") + 1, "claim_token": None}
    if on_crash == "park":
        parked = move(entry, Verb.CRASH, State.UNCERTAIN, note, **counted, **UNLEASED)
        return State.UNCERTAIN if parked else None
    if on_crash == "fail" or entry.crashes + 1 >= limit:
        why = f"{note.reason}; crash {entry.crashes + 1} of at most {limit}"
        return give_up(entry, Verb.CRASH, replace(note, reason=why, error=why), **counted)
    due = {**again(delay), **UNLEASED}
    return State.PENDING if move(entry, Verb.CRASH, State.PENDING, note, **counted, **due) else None


def strand(entry: OutboxEntry, *, note: Note) -> bool:
    """A published message that the broker does not hold: owed again, now."""
    due = again(timedelta())
    return move(entry, Verb.STRAND, State.PENDING, note, strands=F("strands") + 1, **due)


def expire(entry: OutboxEntry, *, note: Note) -> State:
    """Past `expires_at` or `deadline_at` before it started."""
    return give_up(entry, Verb.EXPIRE, note)


def reject(entry: OutboxEntry, *, note: Note) -> State:
    """It cannot be rendered as a message: it fails alone."""
    return give_up(entry, Verb.REJECT, note)


def hand_off(entry: OutboxEntry) -> bool:
    """The broker accepted the message of another code base's task: done from our side."""
    sent = {"publishes": F("publishes") + 1, "published_at": Now()}
    return move(entry, Verb.HANDOFF, State.SUCCEEDED, Note("dispatcher"), **sent, **ended())


def decline(entry_id: UUID, *, delay: timedelta, note: Note, using: str) -> bool:
    """A worker that does not know the task's code gives the delivery back; burns nothing."""
    with transaction.atomic(using=using):
        entry = locked(using).filter(pk=entry_id, status=State.PUBLISHED).first()
        return entry is not None and move(entry, Verb.DECLINE, State.PENDING, note, **again(delay))


def mark_missing(rows: EntryQuerySet, *, missing: bool, limit: int) -> int:
    """Note, or take back, that a look at the broker did not find these published entries."""
    unlike = rows.filter(status=State.PUBLISHED, missing_since__isnull=missing)
    with recovering(unlike.only("pk"), limit=limit) as held:
        found = unlike.filter(pk__in=[entry.pk for entry in held])
        return found.update(missing_since=Now() if missing else None)


def postpone(ids: Sequence[UUID], *, least: timedelta, using: str) -> int:
    """Leave pending entries, which the caller has locked, for as long again as they have waited.

    For `least` at first, so the pause doubles; for ten minutes at most.
    """
    waited = ExpressionWrapper(Now() - F("available_at"), output_field=DurationField())
    pause = Least(Greatest(waited, Value(least)), Value(LONGEST_PAUSE))
    after = ExpressionWrapper(Now() + pause, output_field=DateTimeField())
    rows = OutboxEntry.objects.using(using).filter(pk__in=ids, status=State.PENDING)
    return rows.update(publish_after=after)


def adopt(rows: EntryQuerySet, *, limit: int) -> int:
    """Pending entries whose message is in its queue already: published, by the version held."""
    with recovering(rows.filter(status=State.PENDING).only("version"), limit=limit) as held:
        return publish([(entry.pk, entry.version) for entry in held], using=rows.db)


def note_over_age(rows: EntryQuerySet, *, queue: str, limit: int) -> int:
    """Note of open entries that they are over age, once, and owe their owners word of it."""
    untold = rows.filter(status__in=OPEN, over_age_at__isnull=True)
    with recovering(untold.only("task", "owner"), limit=limit) as held:
        untold.filter(pk__in=[entry.pk for entry in held]).update(over_age_at=Now())
        owe_word_to_owners(held, about="over_age", queue=queue, using=rows.db)
    return len(held)

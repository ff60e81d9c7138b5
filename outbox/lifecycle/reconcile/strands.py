"""Stranded: published in the database, and the broker holds no message for it.

Nothing is repaired before a second look confirms the first: a message can be on its way from a
list to `unacked` during one look, hardly during two. What was published after the pass began, or
within its grace before, is left alone; so a row that is marked was published during the whole
look that did not find its message.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from uuid import UUID

from django.db.models import DurationField, ExpressionWrapper, F, FloatField, Value
from django.db.models.functions import Least, Power

from outbox import transitions
from outbox.conf import settings
from outbox.events import Note
from outbox.lifecycle import repair
from outbox.lifecycle.reconcile.findings import Pass
from outbox.models import EntryQuerySet, OutboxEntry
from outbox.states import State

CHUNK = 5_000  # rows that are marked in one statement
LONGEST_GRACE = timedelta(minutes=10)
_DOUBLINGS = 20  # past that every grace is the longest


def published(this: Pass) -> EntryQuerySet:
    return OutboxEntry.objects.using(this.using).filter(status=State.PUBLISHED)


def past_grace(this: Pass) -> EntryQuerySet:
    """Published for longer than the grace when this pass began.

    It doubles with each strand of the row, so that a stalled worker cannot make a storm of them.
    """
    first = timedelta(seconds=settings().STRAND_GRACE)
    times = Power(Value(2.0), Least(F("strands"), Value(_DOUBLINGS)), output_field=FloatField())
    grown = ExpressionWrapper(Value(first) * times, output_field=DurationField())
    grace = Least(grown, Value(max(first, LONGEST_GRACE)), output_field=DurationField())
    # The first bound says nothing new, but an index has the rows in its order.
    rows = published(this).filter(published_at__lt=this.began - first)
    return rows.filter(published_at__lt=Value(this.began) - grace)


def mark(this: Pass, rows: EntryQuerySet) -> int:
    """Note that a look did not find these; how many are newly missing."""
    if this.dry:
        return rows.filter(missing_since__isnull=True)[:CHUNK].count()
    return transitions.mark_missing(rows, missing=True, limit=CHUNK)


def unmark(this: Pass, rows: EntryQuerySet) -> int:
    """Take that back; of how many. Not of those that somebody holds."""
    return 0 if this.dry else transitions.mark_missing(rows, missing=False, limit=CHUNK)


def strand(this: Pass, rows: EntryQuerySet, *, after: timedelta, reason: str) -> int:
    """Owe again those of `rows` that were missing so long before this pass; how many."""
    # Before this pass began: what it has marked itself, however long it took, is one look.
    confirmed = rows.filter(missing_since__lt=Value(this.began) - Value(after))
    note = Note("reconcile", reason)
    return repair.each(confirmed, partial(transitions.strand, note=note), dry=this.dry)


def between_looks() -> timedelta:
    """How far two looks that confirm each other must be apart."""
    return timedelta(seconds=settings().RECONCILE_EVERY / 2)


def whole_lease() -> timedelta:
    """So long that a living worker has said meanwhile that it holds the message."""
    return max(between_looks(), timedelta(seconds=settings().LEASE))


def uuids(packed: Iterable[bytes]) -> list[UUID]:
    return [UUID(bytes=one) for one in packed]

"""Over age: owed for too long, in whatever open state. Told, and never pushed again."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from django.db.models.functions import Now

from outbox import transitions
from outbox.conf import settings
from outbox.lifecycle.reconcile.findings import Pass
from outbox.models import EntryQuerySet, OutboxEntry, own_seconds
from outbox.transitions import TELL_OWNER

TOLD = 10_000  # entries that are noted in one pass: one message, whatever the number


def tell(this: Pass) -> int:
    """Note what is newly over age, and owe its owners word, once of each entry; how many."""
    if this.dry:
        return sum(rows[:TOLD].count() for rows in _newly(this))
    queue = this.queue_of(TELL_OWNER)
    return sum(transitions.note_over_age(rows, queue=queue, limit=TOLD) for rows in _newly(this))


def _newly(this: Pass) -> Iterator[EntryQuerySet]:
    """By the setting, and by the tasks' own: two queries, since an index serves each."""
    rows = OutboxEntry.objects.using(this.using).unfinished().filter(over_age_at__isnull=True)
    # That word of an old one is old itself is no news to its owner.
    rows = rows.exclude(task=TELL_OWNER)
    limit = settings().OVER_AGE
    old = rows.filter(due_at__lt=Now() - timedelta(seconds=limit))
    yield old.exclude(options__has_key="over_age")
    own = rows.filter(options__has_key="over_age", due_at__lt=Now())
    yield own.filter(due_at__lt=Now() - own_seconds("over_age", limit))

"""Owners who are to be told of something, and to whom no message is owed.

One that was on its way may have taken what it tells before this was committed, or have failed for
good. One in a queue that stands still is called off: it would hold up all that its owner is told.
"""

from __future__ import annotations

from datetime import timedelta

from django.db.models.functions import Now

from outbox import transitions, workers
from outbox.conf import settings
from outbox.events import Note
from outbox.lifecycle.reconcile.findings import Pass
from outbox.models import EntryQuerySet, OutboxEntry
from outbox.states import WAITING
from outbox.transitions import TELL_OWNER

_NOTE = Note("reconcile", "its queue stands still: another one takes its place")


def tell(this: Pass) -> int:
    """Owe each of them a message; to how many."""
    if not this.dry:
        for entry in _stuck(using=this.using):
            transitions.cancel(entry.pk, note=_NOTE, using=this.using)
    waiting = transitions.has_no_message(transitions.untold(using=this.using))
    found = waiting.order_by("owner").values_list("owner", flat=True).distinct()
    owners = list(found[: settings().REPAIRS_PER_PASS])
    if owners and not this.dry:
        transitions.owe_untold(owners, queue=this.queue_of(TELL_OWNER), using=this.using)
    return len(owners)


def _stuck(*, using: str) -> EntryQuerySet:
    """Messages that wait for a worker, where nobody takes them, and somebody takes others."""
    rows = OutboxEntry.objects.using(using).filter(task=TELL_OWNER, unique_key__isnull=False)
    if not (moving := workers.moving(using=using)):
        return rows.none()
    long = timedelta(seconds=settings().TELL_EVERY)
    late = rows.filter(status__in=WAITING, available_at__lt=Now() - long)
    return late.exclude(queue__in=moving)[: settings().REPAIRS_PER_PASS]

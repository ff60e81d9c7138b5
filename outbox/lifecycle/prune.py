"""prune: final entries leave after their retention, in small batches."""

from __future__ import annotations

from datetime import timedelta

from django.db.models.functions import Now

from outbox import transitions
from outbox.conf import DAY, settings
from outbox.models import EntryQuerySet, OutboxEntry, OutboxWorker, own_seconds
from outbox.ticks import Renew


def prune(*, using: str, renew: Renew = lambda: None) -> int:
    """Delete the final entries whose retention is past; how many."""
    done = 0
    # What is owed by an entry's end reads that entry. Once for all batches: an end that is past its
    # retention owes nothing more.
    rows = OutboxEntry.objects.using(using).unfinished().filter(task=transitions.FOLLOW)
    followed = [parent for parent in rows.values_list("parent_id", flat=True) if parent]
    for status, seconds in settings().RETENTION.items():
        ended = OutboxEntry.objects.using(using).filter(status=status).exclude(pk__in=followed)
        kept_for = own_seconds("retention", seconds)
        own = ended.filter(options__has_key="retention", finished_at__lt=Now() - kept_for)
        done += _delete(own, renew)
        past = ended.filter(finished_at__lt=Now() - timedelta(seconds=seconds))
        done += _delete(past.exclude(options__has_key="retention"), renew)
    _forget_workers(using=using)
    return done


def _forget_workers(*, using: str) -> None:
    """The last one stays: by it `outbox_status` knows that there have been workers."""
    workers = OutboxWorker.objects.using(using)
    last = workers.order_by("-heartbeat_at").values("pk")[:1]
    workers.filter(heartbeat_at__lt=Now() - timedelta(seconds=DAY)).exclude(pk__in=last).delete()


def _delete(rows: EntryQuerySet, renew: Renew) -> int:
    size, done = settings().BATCH_SIZE, 0
    while (gone := transitions.prune(rows, limit=size)) == size:
        done += gone
        renew()
    return done + gone

"""prune: final entries leave after their retention, in small batches."""

from __future__ import annotations

from datetime import timedelta

from django.db.models import DurationField
from django.db.models.expressions import RawSQL
from django.db.models.functions import Now

from outbox import transitions
from outbox.conf import DAY, settings
from outbox.models import EntryQuerySet, OutboxEntry, OutboxWorker
from outbox.states import FINAL
from outbox.ticks import Renew

# The task's own `retention`, in seconds, which enqueue wrote into the options. Raw: the ORM has
# no cast from jsonb text to an interval.
_OWN_RETENTION = RawSQL(
    "(options ->> 'retention')::float8 * interval '1 second'", (), output_field=DurationField()
)


def prune(*, using: str, renew: Renew = lambda: None) -> int:
    """Delete the final entries whose retention is past; how many."""
    rows = OutboxEntry.objects.using(using)
    own = rows.filter(options__has_key="retention")
    done = _delete(own.filter(status__in=FINAL, finished_at__lt=Now() - _OWN_RETENTION), renew)
    for status, seconds in settings().RETENTION.items():
        past = rows.filter(status=status, finished_at__lt=Now() - timedelta(seconds=seconds))
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

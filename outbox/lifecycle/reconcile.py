"""reconcile: what the database says against what the broker really holds, and the repair.

A first sweep: published entries that the broker does not hold are published again. A message
that waits in a deep queue is not stranded, however old.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from celery import Celery
from django.db.models.functions import Now

from outbox import transitions
from outbox.brokers import redis
from outbox.brokers.connections import is_redis
from outbox.conf import settings
from outbox.errors import BrokerUnavailable
from outbox.events import Note
from outbox.lifecycle import lease
from outbox.models import EntryQuerySet, OutboxEntry
from outbox.states import State


@dataclass(frozen=True)
class Findings:
    """What one pass found and repaired, by kind."""

    expired: int = 0
    crashed: int = 0
    settled: int = 0
    missing: int = 0  # seen to be missing for the first time: another look must confirm it
    stranded: int = 0
    broker: str = ""  # why it could not be looked at


def reconcile(app: Celery, *, using: str) -> Findings:
    """One pass. Repairs at most `REPAIRS_PER_PASS` of each kind."""
    swept: dict[str, Any] = {**lease.sweep(using=using)}
    if not is_redis(app):
        return Findings(**swept)
    try:
        missing, stranded = _strand(app, using=using)
    except BrokerUnavailable as error:
        return Findings(**swept, broker=str(error))
    return Findings(**swept, missing=missing, stranded=stranded)


def _strand(app: Celery, *, using: str) -> tuple[int, int]:
    rows = _past_grace(using=using)
    # The missing ones first, so that a confirmation never waits behind new candidates.
    looked = dict(
        rows.order_by("missing_since", "published_at").values_list("pk", "queue")[
            : settings().REPAIRS_PER_PASS
        ]
    )
    if not looked:
        return 0, 0
    ids = {str(pk): pk for pk in looked}
    there = redis.held(app, ids.keys(), queues=sorted(set(looked.values())))
    gone = [pk for text, pk in ids.items() if text not in there]
    transitions.mark_missing([ids[text] for text in there], missing=False, using=using)
    stranded = _strand_confirmed(rows.filter(pk__in=gone))
    return transitions.mark_missing(gone, missing=True, using=using), stranded


def _past_grace(*, using: str) -> EntryQuerySet:
    grace = timedelta(seconds=settings().STRAND_GRACE)
    return OutboxEntry.objects.using(using).filter(
        status=State.PUBLISHED, published_at__lt=Now() - grace
    )


def _strand_confirmed(rows: EntryQuerySet) -> int:
    """A message can be between a list and `unacked` during one look, hardly during two."""
    apart = timedelta(seconds=settings().RECONCILE_EVERY / 2)
    confirmed = rows.filter(missing_since__lt=Now() - apart)
    with transitions.recovering(confirmed, limit=settings().REPAIRS_PER_PASS) as found:
        note = Note("reconcile", "the broker holds no message for it")
        return sum(transitions.strand(entry, note=note) for entry in found)

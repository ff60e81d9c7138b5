"""reconcile: what the database says against what the broker really holds, and the repair.

A first sweep: published entries that the broker does not hold are published again. A message
that waits in a deep queue is not stranded, however old.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from celery import Celery
from django.db.models import Q
from django.db.models.functions import Now

from outbox import transitions, workers
from outbox.brokers import redis
from outbox.brokers.connections import is_redis
from outbox.conf import settings
from outbox.errors import BrokerUnavailable
from outbox.events import Note
from outbox.lifecycle import lease
from outbox.models import EntryQuerySet, OutboxEntry
from outbox.states import State

CHUNK = 5_000  # rows a read

Looked = tuple[UUID, datetime | None, datetime | None]  # ID, published_at, missing_since


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
    queues = sorted(set(rows.values_list("queue", flat=True).distinct()))
    if not queues:
        return 0, 0
    # The broker first: what is still published when the rows are read was there to be seen.
    held = redis.held(app, queues=queues)
    orphaned = held.unacked - held.queued - workers.held_by_the_living(using=using)
    there = held.queued | held.unacked - orphaned
    missing = sum(_compare(chunk, there, using=using) for chunk in _chunks(rows))
    return missing, _strand_confirmed(rows, orphaned=[UUID(bytes=found) for found in orphaned])


def _compare(chunk: Sequence[Looked], there: Container[bytes], *, using: str) -> int:
    """Note which of these the broker does not hold, and which are back; how many are newly gone."""
    gone = [pk for pk, _, since in chunk if since is None and pk.bytes not in there]
    back = [pk for pk, _, since in chunk if since is not None and pk.bytes in there]
    transitions.mark_missing(back, missing=False, using=using)
    return transitions.mark_missing(gone, missing=True, using=using)


def _chunks(rows: EntryQuerySet) -> Iterator[list[Looked]]:
    """All of the rows, a bounded number at a time, by the index on their publish time."""
    rows, last = rows.order_by("published_at", "pk"), Q()
    while chunk := list(
        rows.filter(last).values_list("pk", "published_at", "missing_since")[:CHUNK]
    ):
        yield chunk
        pk, at, _ = chunk[-1]
        last = Q(published_at__gt=at) | Q(published_at=at, pk__gt=pk)


def _past_grace(*, using: str) -> EntryQuerySet:
    grace = timedelta(seconds=settings().STRAND_GRACE)
    return OutboxEntry.objects.using(using).filter(
        status=State.PUBLISHED, published_at__lt=Now() - grace
    )


def _strand_confirmed(rows: EntryQuerySet, *, orphaned: Sequence[UUID]) -> int:
    """Publish again what a second look missed too: what it saw again is no longer marked.

    A message can be between a list and `unacked` during one look, hardly during two. One that a
    worker took is waited for a whole lease, in which a living one would have said that it holds it.
    """
    apart = timedelta(seconds=settings().RECONCILE_EVERY / 2)
    lease = max(apart, timedelta(seconds=settings().LEASE))
    lost = rows.filter(missing_since__lt=Now() - apart).exclude(pk__in=orphaned)
    stuck = rows.filter(missing_since__lt=Now() - lease, pk__in=orphaned)
    return _strand_each(lost, "the broker holds no message for it") + _strand_each(
        stuck, "only a worker that is gone holds its message"
    )


def _strand_each(rows: EntryQuerySet, reason: str) -> int:
    with transitions.recovering(rows, limit=settings().REPAIRS_PER_PASS) as found:
        return sum(transitions.strand(entry, note=Note("reconcile", reason)) for entry in found)

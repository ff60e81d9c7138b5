"""The ticks' work, from beat, the commands and the dispatcher alike, and recorded."""

from __future__ import annotations

from dataclasses import asdict

from celery import Celery

from outbox import ticks
from outbox.conf import settings
from outbox.errors import BrokerUnavailable
from outbox.lifecycle import lease, publish
from outbox.lifecycle import prune as pruning
from outbox.lifecycle import reconcile as reconciling
from outbox.ticks import Found

_PRUNE_LEASE = 60.0  # seconds: one whose process died keeps the others out no longer


def dispatch(app: Celery, *, batches: int | None = None, using: str) -> Found:
    """Sweep, then publish all that is due, or at most so many batches of it.

    Without a lease: two at once skip the rows that the other holds, and one that dies must keep
    nobody out.
    """
    return ticks.run(ticks.DISPATCH, lambda: _dispatch(app, batches, using=using), using=using)


def _dispatch(app: Celery, batches: int | None, *, using: str) -> Found:
    swept = lease.sweep(using=using)
    if settings().PAUSED:
        return {**swept, "paused": True}
    try:
        return {**swept, "published": publish.dispatch(app, batches=batches, using=using)}
    except BrokerUnavailable as error:
        return {**swept, "published": 0, "broker": str(error)}


def reconcile(app: Celery, *, using: str) -> Found | None:
    """Compare and repair. None: another process is at it."""

    def work() -> Found:
        return asdict(reconciling.reconcile(app, using=using))

    # Two rounds: one that outlives them meets another, and each repair is guarded anyway.
    seconds = 2 * settings().RECONCILE_EVERY
    return ticks.run_alone(ticks.RECONCILE, work, lease=seconds, using=using)


def prune(*, using: str) -> Found | None:
    """Delete what is past its retention. None: another process is at it."""

    def work() -> Found:
        return {"pruned": pruning.prune(using=using)}

    return ticks.run_alone(ticks.PRUNE, work, lease=_PRUNE_LEASE, using=using)

"""The ticks' work, from beat, the commands and the worker alike: under a lease, and recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from celery import Celery

from outbox import ticks
from outbox.conf import settings
from outbox.errors import BrokerUnavailable
from outbox.lifecycle import lease, publish
from outbox.lifecycle import prune as pruning
from outbox.lifecycle import reconcile as reconciling

Found = Mapping[str, Any]

# Seconds for which a process that died in a tick keeps the others out. Short for dispatch: two at
# once disturb nobody, since each skips the rows that the other holds.
_SHORT, _LONG = 3.0, 60.0


def dispatch(app: Celery, *, using: str) -> Found | None:
    """Sweep, then publish all that is due. None: another process is at it."""
    return ticks.run_tick(
        ticks.DISPATCH,
        lambda: _dispatch(app, using=using),
        lease=_SHORT,
        using=using,
    )


def _dispatch(app: Celery, *, using: str) -> Found:
    swept = lease.sweep(using=using)
    if settings().PAUSED:
        return {**swept, "paused": True}
    try:
        return {**swept, "published": publish.dispatch(app, using=using)}
    except BrokerUnavailable as error:
        return {**swept, "published": 0, "broker": str(error)}


def reconcile(app: Celery, *, using: str) -> Found | None:
    """Compare and repair. None: another process is at it."""
    return ticks.run_tick(
        ticks.RECONCILE,
        lambda: asdict(reconciling.reconcile(app, using=using)),
        lease=_LONG,
        using=using,
    )


def prune(*, using: str) -> Found | None:
    """Delete what is past its retention. None: another process is at it."""
    return ticks.run_tick(
        ticks.PRUNE, lambda: {"pruned": pruning.prune(using=using)}, lease=_LONG, using=using
    )

"""Maintenance ticks: any number of processes may try one, a lease on its row lets one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from django.db.models import Q
from django.db.models.functions import Now

from outbox.models import OutboxTick
from outbox.worker import identity

DISPATCH, RECONCILE, PRUNE = "dispatch", "reconcile", "prune"
NAMES = (DISPATCH, RECONCILE, PRUNE)


def run_tick(
    name: str, work: Callable[[], Mapping[str, Any]], *, lease: float, using: str
) -> Mapping[str, Any] | None:
    """Do `work` unless somebody else does, and record what it found. None: somebody else does.

    `lease` bounds, in seconds, how long a process that died can keep the others out.
    """
    if not _take(name, lease=lease, using=using):
        return None
    start = time.monotonic()
    try:
        found = work()
    except BaseException:
        _mine(name, using=using).update(lease_owner=None, lease_until=None)
        raise
    _mine(name, using=using).update(
        lease_owner=None,
        lease_until=None,
        last_at=Now(),
        duration=timedelta(seconds=time.monotonic() - start),
        findings=dict(found),
    )
    return found


def _take(name: str, *, lease: float, using: str) -> bool:
    ticks = OutboxTick.objects.using(using)
    ticks.bulk_create([OutboxTick(name=name)], ignore_conflicts=True)
    free = Q(lease_until__isnull=True) | Q(lease_until__lt=Now())
    until = Now() + timedelta(seconds=lease)
    return bool(ticks.filter(free, name=name).update(lease_owner=identity.BOOT, lease_until=until))


def _mine(name: str, *, using: str) -> Any:
    return OutboxTick.objects.using(using).filter(name=name, lease_owner=identity.BOOT)

"""Maintenance ticks: the record of each, and a lease for those of which only one may run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from django.db.models import F, Q
from django.db.models.functions import Now

from outbox.models import OutboxTick
from outbox.worker import identity

DISPATCH, RECONCILE, PRUNE = "dispatch", "reconcile", "prune"
NAMES = (DISPATCH, RECONCILE, PRUNE)

Found = Mapping[str, Any]
_FREE: Mapping[str, Any] = {"lease_owner": None, "lease_until": None}


def run(name: str, work: Callable[[], Found], *, using: str) -> Found:
    """Do `work`, which any number of processes may do at once, and record what it found."""
    _exists(name, using=using)
    start = time.monotonic()
    found = work()
    _rows(name, using=using).update(**_outcome(found, since=start))
    return found


def run_alone(name: str, work: Callable[[], Found], *, lease: float, using: str) -> Found | None:
    """Do `work` unless somebody else does, and record what it found. None: somebody else does.

    `lease` bounds, in seconds, how long a process that died can keep the others out.
    """
    if not _take(name, lease=lease, using=using):
        return None
    mine = _rows(name, using=using).filter(lease_owner=identity.BOOT)
    start = time.monotonic()
    try:
        found = work()
    except BaseException:
        mine.update(**_FREE)
        raise
    mine.update(**_FREE, **_outcome(found, since=start))
    return found


def late_in(name: str, seconds: float, *, using: str) -> float:
    """In how many seconds nobody will have done it for so long. By the database's clock."""
    rows = _rows(name, using=using).filter(last_at__isnull=False)
    age = rows.values_list(Now() - F("last_at"), flat=True).first()
    return 0.0 if age is None else max(0.0, seconds - float(age.total_seconds()))


def _take(name: str, *, lease: float, using: str) -> bool:
    _exists(name, using=using)
    free = Q(lease_until__isnull=True) | Q(lease_until__lt=Now())
    until = Now() + timedelta(seconds=lease)
    rows = _rows(name, using=using).filter(free)
    return bool(rows.update(lease_owner=identity.BOOT, lease_until=until))


def _outcome(found: Found, *, since: float) -> dict[str, Any]:
    took = timedelta(seconds=time.monotonic() - since)
    return {"last_at": Now(), "duration": took, "findings": dict(found)}


def _exists(name: str, *, using: str) -> None:
    OutboxTick.objects.using(using).bulk_create([OutboxTick(name=name)], ignore_conflicts=True)


def _rows(name: str, *, using: str) -> Any:
    return OutboxTick.objects.using(using).filter(name=name)

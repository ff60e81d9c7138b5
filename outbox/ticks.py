"""Maintenance ticks: the record of each, and a lease for those of which only one may run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

from django.db.models import DateTimeField, DurationField, ExpressionWrapper, F, Q, Value
from django.db.models.functions import Coalesce, Now

from outbox.errors import Overtaken
from outbox.models import OutboxTick

LONGEST = 600.0  # seconds: a lease that ends later was taken by a clock that was set back

DISPATCH, RECONCILE, PRUNE = "dispatch", "reconcile", "prune"
NAMES = (DISPATCH, RECONCILE, PRUNE)

Found = Mapping[str, Any]
#: To be called between steps: extends the lease when a third of it is over.
#: Raises `Overtaken` where the lease ran out meanwhile, and somebody else has it.
Renew = Callable[[], None]
_FREE: Mapping[str, Any] = {"lease_owner": None, "lease_until": None}


def run(name: str, work: Callable[[], Found], *, using: str) -> Found:
    """Do `work`, which any number of processes may do at once, and record what it found."""
    _exists(name, using=using)
    start = time.monotonic()
    found = work()
    _rows(name, using=using).update(**_outcome(found, since=start))
    return found


def run_alone(
    name: str, work: Callable[[Renew], Found], *, lease: float, apart: float = 0, using: str
) -> Found | None:
    """Do `work` unless somebody else does, and record what it found. None: somebody else does.

    `lease` bounds, in seconds, how long a process that died can keep the others out; `work` renews
    it as it goes on. With `apart`, it is also left where the last run began less than so many
    seconds ago: any number of beats then make one run a round.
    """
    # Drawn anew for each run: the children of a worker share its boot, and one must not take the
    # lease of another for its own.
    token = uuid4()
    mine = _rows(name, using=using).filter(lease_owner=token)
    start = time.monotonic()
    if not _take(name, token, lease=lease, apart=apart, using=using):
        return None
    try:
        found = work(_renewer(mine, lease=lease))
    except Overtaken:
        return None
    except BaseException:
        mine.update(**_FREE)
        raise
    mine.update(**_FREE, **_outcome(found, since=start))
    return found


def late_in(name: str, seconds: float, *, using: str) -> float:
    """In how many seconds nobody will have done it for so long. By the database's clock.

    Where that was set back, a run far in the future is long ago.
    """
    rows = _rows(name, using=using).filter(last_at__isnull=False)
    age = rows.values_list(Now() - F("last_at"), flat=True).first()
    if age is None or age.total_seconds() < -seconds:
        return 0.0
    return max(0.0, seconds - float(age.total_seconds()))


def compared_until(*, using: str) -> datetime | None:
    """Up to when reconcile has compared the ended entries with the result store."""
    return _rows(RECONCILE, using=using).values_list("compared_until", flat=True).first()  # type: ignore[no-any-return]


def note_compared(until: datetime, *, using: str) -> None:
    """Remember that, for the next pass."""
    _exists(RECONCILE, using=using)
    _rows(RECONCILE, using=using).update(compared_until=until)


def _take(name: str, token: Any, *, lease: float, apart: float, using: str) -> bool:
    _exists(name, using=using)
    unowned = Q(lease_until__isnull=True) | Q(lease_until__lt=Now())
    unowned |= Q(lease_until__gt=_until(max(2 * lease, LONGEST)))
    rows = _rows(name, using=using).filter(unowned)
    if apart:
        # Of its beginning: a run that takes most of a round must not cost the next one.
        took = Coalesce(F("duration"), Value(timedelta()), output_field=DurationField())
        began = ExpressionWrapper(F("last_at") - took, output_field=DateTimeField())
        long_ago = Q(began__lt=Now() - timedelta(seconds=apart))
        long_ago |= Q(last_at__isnull=True) | Q(last_at__gt=_until(apart))  # or the clock went back
        rows = rows.annotate(began=began).filter(long_ago)
    return bool(rows.update(lease_owner=token, lease_until=_until(lease)))


def _renewer(mine: Any, *, lease: float) -> Renew:
    renewed = time.monotonic()

    def renew() -> None:
        nonlocal renewed
        if time.monotonic() - renewed < lease / 3:
            return
        if not mine.update(lease_until=_until(lease)):
            raise Overtaken("the lease of this run is over, and another one has it")
        renewed = time.monotonic()

    return renew


def _until(lease: float) -> Any:
    return Now() + timedelta(seconds=lease)


def _outcome(found: Found, *, since: float) -> dict[str, Any]:
    took = timedelta(seconds=time.monotonic() - since)
    return {"last_at": Now(), "duration": took, "findings": dict(found)}


def _exists(name: str, *, using: str) -> None:
    OutboxTick.objects.using(using).bulk_create([OutboxTick(name=name)], ignore_conflicts=True)


def _rows(name: str, *, using: str) -> Any:
    return OutboxTick.objects.using(using).filter(name=name)

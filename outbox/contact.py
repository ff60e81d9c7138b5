"""Since when the database has been in reach of anybody: each worker and sweeper leaves word.

It is kept in the database itself. A process knows of its own luck only, and the one that sweeps
first after an outage may have been idle, or have just been started.
"""

from __future__ import annotations

from datetime import timedelta

from django.db.models import F
from django.db.models.functions import Now

from outbox import prepared, sql
from outbox.conf import settings
from outbox.models import OutboxTick

_ROW = "contact"


def leave_word(*, using: str) -> None:
    """Say that somebody has the database in reach now."""
    with prepared.cursor(using) as cursor:
        cursor.execute(sql.CONTACT, {"name": _ROW, "gap": _gap()})


def unbroken_for(*, using: str) -> float:
    """For how many seconds there has been word without a gap, until now."""
    rows = OutboxTick.objects.using(using).filter(name=_ROW, last_at__gte=Now() - _gap())
    found = rows.values_list(Now() - F("unbroken_since"), flat=True).first()
    return max(0.0, found.total_seconds()) if found else 0.0


def _gap() -> timedelta:
    """Every living worker leaves word each third of a lease: a shorter gap costs nobody one."""
    return timedelta(seconds=settings().LEASE / 2)

"""Since when the database has been in reach of anybody: each worker and sweeper leaves word.

It is kept in the database itself. A process knows of its own luck only, and the one that sweeps
first after an outage may have been idle, or have just been started.
"""

from __future__ import annotations

from datetime import timedelta

from outbox import prepared, sql
from outbox.conf import settings


def unbroken_for(*, using: str) -> float:
    """Leave word, and for how many seconds there has been some without a gap.

    Every living worker leaves word each third of a lease. A gap of half a lease is one in which
    some could not renew; a shorter one costs nobody a lease.
    """
    gap = timedelta(seconds=settings().LEASE / 2)
    with prepared.cursor(using) as cursor:
        cursor.execute(sql.CONTACT, {"gap": gap})
        return float(cursor.fetchone()[0])

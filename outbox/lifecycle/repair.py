"""A bounded number of repairs, each of a row that is held meanwhile; or only their count."""

from __future__ import annotations

from collections.abc import Callable

from outbox import transitions
from outbox.conf import settings
from outbox.models import EntryQuerySet, OutboxEntry


def each(rows: EntryQuerySet, work: Callable[[OutboxEntry], object], *, dry: bool = False) -> int:
    """Do `work` on up to `REPAIRS_PER_PASS` of `rows`, skipping what is locked; how many.

    `dry`: on how many it would be done.
    """
    limit = settings().REPAIRS_PER_PASS
    if dry:
        return rows[:limit].count()
    with transitions.recovering(rows, limit=limit) as held:
        for entry in held:
            work(entry)
    return len(held)

"""The published entries, by IDs that fit into memory at a million of them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from struct import Struct
from uuid import UUID

from django.db import connections

from outbox import sql, workers
from outbox.lifecycle.reconcile.findings import Pass
from outbox.models import OutboxEntry
from outbox.states import OPEN

PAGE = 50_000  # rows a read

_ID = Struct("16s")
_FIRST = (datetime(1, 1, 1, tzinfo=UTC), UUID(int=0))


def ids(this: Pass, *, marked: bool = False) -> Iterator[list[bytes]]:
    """All published entries, or those marked as missing, by their IDs of 16 bytes, in pages."""
    statement = sql.IDS_OF_MISSING if marked else sql.IDS_OF_PUBLISHED
    at, last = _FIRST
    while True:
        with connections[this.using].cursor() as cursor:
            cursor.execute(statement, {"at": at, "last": last, "limit": PAGE})
            packed, at = cursor.fetchone()
        if packed is None:
            return
        yield [found for (found,) in _ID.iter_unpack(packed)]
        last = UUID(bytes=bytes(packed[-16:]))
        this.renew()


def queues(this: Pass) -> list[str]:
    """Where a message may wait: queues of open entries, of this app, and of living workers."""
    rows = OutboxEntry.objects.using(this.using).filter(status__in=OPEN)
    owed = rows.order_by().values_list("queue", flat=True).distinct()
    own = (queue.name for queue in this.app.amqp.queues.values())
    return sorted({*owed, *own, *workers.consumed(using=this.using)})

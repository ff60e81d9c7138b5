"""What owners are to be told of, and the one message that is owed to each.

Whatever calls for an owner writes a notice, in its own transaction, and sees that a message to that
owner is owed. There is one at a time: its unique key is the owner.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db import OperationalError, connections, transaction
from django.db.models import Exists, OuterRef, QuerySet

from outbox import prepared, sql, workers
from outbox.clock import new_id
from outbox.conf import settings
from outbox.models import OutboxEntry, OutboxNotice
from outbox.payload import dumps
from outbox.signals import announce_need
from outbox.transitions.jobs import enqueue, plain_row

logger = logging.getLogger("outbox")

TELL_OWNER = "outbox.tell_owner"
LOCK_TIMEOUT = "500ms"  # for somebody who owes the same owner a message, and does not commit

_GATHER = 30  # what comes within a thirtieth of TELL_EVERY goes into the same message
_LOCKED = "55P03"  # lock_not_available
_AT_ONCE = 1000  # rows of an INSERT

#: The database, and owner → queue of the messages that are owed at the end of its transaction.
_gathered: ContextVar[tuple[str, dict[str, str]]] = ContextVar("outbox_gathered", default=("", {}))


def owner_of(entry: OutboxEntry) -> str:
    """Who hears of it. That message itself has no owner."""
    return "" if entry.task == TELL_OWNER else entry.owner or settings().DEFAULT_OWNER


def owe_word_to_owners(
    entries: Sequence[OutboxEntry], *, about: str, queue: str, using: str
) -> None:
    """Note in the same transaction what the entries' owners are to be told, and owe the messages.

    `queue`: which to take, where it moves.
    """
    owners = [(entry, owner_of(entry)) for entry in entries]
    rows = [OutboxNotice(entry=entry, owner=owner, about=about) for entry, owner in owners if owner]
    OutboxNotice.objects.using(using).bulk_create(rows, batch_size=_AT_ONCE)
    for entry, owner in owners:
        told: dict[str, Any] = {"entry_id": entry.pk, "task": entry.task, "owner": owner}
        announce_need(**told, about=about, using=using)
    owe_messages({owner: queue for _, owner in owners if owner}, using=using)


def owe_messages(queues: Mapping[str, str], *, using: str) -> None:
    """Owe a message to each of these owners, now or at the end of what is `gathered`."""
    alias, owed = _gathered.get()
    if alias == using:
        owed.update({**queues, **owed})
    elif queues:
        _owe_patiently(queues, using=using)


@contextmanager
def gathered(*, using: str) -> Iterator[None]:
    """Owe the messages at the end of the block, which ends a transaction of several entries.

    In the order of their names, since whoever owes an owner a message waits for another who does
    the same to commit: two batches that met the owners in different orders would be a deadlock. At
    the end, so that nobody waits for long.
    """
    owed: dict[str, str] = {}
    before = _gathered.set((using, owed))
    try:
        yield
    finally:
        _gathered.reset(before)
    owe_messages(owed, using=using)


def _owe_patiently(queues: Mapping[str, str], *, using: str) -> None:
    """Or leave it to reconcile: the notices stand, and what was done to the entries must.

    Whoever owes the same owner a message may be frozen before its commit: nobody else's job may
    wait for that.
    """
    try:
        with transaction.atomic(using=using):
            with connections[using].cursor() as cursor:
                cursor.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
            for owner in sorted(queues):
                _owe_message(owner, queue=queues[owner], using=using)
    except OperationalError as error:
        if getattr(error.__cause__, "sqlstate", None) != _LOCKED:
            raise
        logger.info("outbox.owner.deferred in %s: %s", using, error)


def _owe_message(owner: str, *, queue: str, using: str) -> None:
    """Unless one is owed already, which takes along what has been noted when it is sent."""
    every = settings().TELL_EVERY
    row: dict[str, Any] = {
        "id": new_id(),
        "task": TELL_OWNER,
        "args": dumps([owner, using]),
        "options": dumps({"unique_key": owner}),
        "queue": workers.moving_queue(queue, using=using),
        "unique_key": owner,
        "countdown": timedelta(seconds=every / _GATHER),
    }
    if enqueue(plain_row(row), using=using):
        _put_off(row["id"], owner=owner, every=timedelta(seconds=every), using=using)


def _put_off(entry_id: UUID, *, owner: str, every: timedelta, using: str) -> None:
    with prepared.cursor(using) as cursor:
        cursor.execute(sql.PUT_OFF, {"id": entry_id, "owner": owner, "every": every})


def untold(*, using: str) -> QuerySet[OutboxNotice]:
    """What nobody has been told yet; some of it may be with a message that is on its way.

    That one has a live key. So of an owner without one all is free to be taken, also what a message
    took that has failed for good, was cancelled, or is gone.
    """
    return OutboxNotice.objects.using(using).filter(told_at__isnull=True)


def has_no_message(notices: QuerySet[OutboxNotice]) -> QuerySet[OutboxNotice]:
    """Of these, those to whose owner no message is owed."""
    owed = OutboxEntry.objects.filter(task=TELL_OWNER, unique_key=OuterRef("owner"))
    return notices.filter(~Exists(owed))

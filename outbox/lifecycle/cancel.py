"""cancel: an entry that will not run, or not again, whatever happens to it afterwards."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any
from uuid import UUID

from celery import Celery, current_app
from django.db import transaction

from outbox import transitions
from outbox.brokers.connections import bounded, sentence
from outbox.conf import default_database
from outbox.errors import Cancelled
from outbox.events import Note
from outbox.lifecycle.claim import Claim
from outbox.models import OutboxEntry
from outbox.outage import until_answered
from outbox.states import State

logger = logging.getLogger("outbox")

TERMINATE = "outbox_terminate"  # the remote control command, `outbox.worker.control`


def cancel(
    entry_id: UUID | str, *, actor: str, reason: str = "", terminate: bool = False, using: str = ""
) -> bool:
    """Cancel an entry: final at once in the record, on every path.

    A run that goes on is not interrupted, but its end is discarded. False: it has ended already.

    Args:
        actor: who asks for it, for the events: `user:alice`, `shop.orders`.
        terminate: once this has committed, also kill the child that runs it (prefork; in gevent
            its greenlet; threads and solo cannot), also where it was cancelled before. Asked of
            its worker through the broker, at most once: a worker that does not hear of it lets
            the run go on.
    """
    entry_id, using = as_id(entry_id), using or default_database()
    cancelled = transitions.cancel(entry_id, note=Note(actor, reason), using=using)
    if terminate:
        transaction.on_commit(partial(_end_run, entry_id, using=using), using=using, robust=True)
    return cancelled


def cancel_many(
    entry_ids: Iterable[UUID | str],
    *,
    actor: str,
    reason: str = "",
    terminate: bool = False,
    using: str = "",
) -> int:
    """Cancel these entries, each as `cancel` does and in the order of their IDs; how many it did.

    Inside the caller's transaction where there is one, else each in its own, so that a list of
    any length holds no lock for long.
    """
    in_order = sorted({as_id(entry_id) for entry_id in entry_ids})
    return sum(
        cancel(entry_id, actor=actor, reason=reason, terminate=terminate, using=using)
        for entry_id in in_order
    )


def _end_run(entry_id: UUID, *, using: str) -> None:
    """Have the worker that still runs it, as the row says now, end exactly that run."""
    rows = OutboxEntry.objects.using(using).filter(pk=entry_id, status=State.CANCELLED)
    entry = rows.only("lease_owner", "lease_pid").first()
    if entry is None or not entry.run_goes_on:
        return
    run = {"entry_id": str(entry_id), "owner": str(entry.lease_owner), "pid": entry.lease_pid}
    try:
        _broadcast(current_app._get_current_object(), run)
    except Exception as error:  # it is cancelled all the same
        logger.warning("outbox.run.unreached entry_id=%s: %s", entry_id, sentence(error))


def _broadcast(app: Celery, run: dict[str, Any]) -> None:
    with bounded(app) as connection:
        app.control.broadcast(TERMINATE, arguments=run, connection=connection)


def raise_if_cancelled(claim: Claim) -> None:
    """In a body: whether its end would still count.

    Raises:
        Cancelled: the entry was cancelled, or another run owns it by now.
    """

    def look() -> OutboxEntry | None:
        rows = OutboxEntry.objects.using(claim.using).filter(pk=claim.id)
        return rows.only("status", "claim_token").first()

    entry = until_answered(look, using=claim.using, what="looking for a cancellation")
    if entry is None or entry.claim_token != claim.token:
        raise Cancelled("its lease ran out, and it is another run's now")
    if entry.status == State.CANCELLED:
        raise Cancelled("it saw that it was cancelled")


def as_id(value: Any) -> UUID:
    """An entry's ID, from a UUID or its text.

    Raises:
        ValueError: it is neither.
    """
    return value if isinstance(value, UUID) else UUID(str(value))

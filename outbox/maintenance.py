"""The ticks' work, from beat, the commands and the dispatcher alike, and recorded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict

from celery import Celery
from django.db import DatabaseError, InterfaceError, connections

from outbox import ticks
from outbox.conf import settings
from outbox.errors import BrokerUnavailable
from outbox.lifecycle import lease, publish
from outbox.lifecycle import prune as pruning
from outbox.lifecycle import reconcile as reconciling
from outbox.outage import part
from outbox.ticks import Found, Renew

logger = logging.getLogger("outbox")

# Everything that the database or a driver's broken socket may raise while it is away.
AWAY = (DatabaseError, InterfaceError)
_PRUNE_LEASE = 60.0  # seconds: one whose process died keeps the others out no longer


def dispatch(app: Celery, *, batches: int | None = None, using: str) -> Found:
    """Sweep, then publish all that is due, or at most so many batches of it.

    Without a lease: two at once skip the rows that the other holds, and one that dies must keep
    nobody out.
    """
    return ticks.run(ticks.DISPATCH, lambda: _dispatch(app, batches, using=using), using=using)


def _dispatch(app: Celery, batches: int | None, *, using: str) -> Found:
    swept = part("sweep", lambda: lease.sweep(using=using), using=using)
    if settings().PAUSED:
        return {**swept, "paused": True}

    def publishing() -> Found:
        return {"published": publish.dispatch(app, batches=batches, using=using)}

    try:
        return {**swept, "published": 0, **part("publish", publishing, using=using)}
    except BrokerUnavailable as error:
        return {**swept, "published": 0, "broker": str(error)}


def reconcile(app: Celery, *, using: str, anew: bool = False, remove: bool = False) -> Found | None:
    """Compare and repair. None: another process is at it, or was at it less than a round ago.

    `anew`: also where it was. `remove`: also the messages of entries that have ended.
    """

    def work(renew: Renew) -> Found:
        return asdict(reconciling.reconcile(app, using=using, remove=remove, renew=renew))

    every = settings().RECONCILE_EVERY
    return ticks.run_alone(
        ticks.RECONCILE,
        work,
        lease=2 * every,  # renewed while it runs; one that was killed keeps the others out so long
        apart=0 if anew else every / 2,
        using=using,
    )


def recover(app: Celery, *, using: str) -> Found | None:
    """Reconcile, and publish at once what is owed again: it has waited long enough."""
    found = reconcile(app, using=using)
    if found and (found["stranded"] or found["orphaned"]):
        dispatch(app, batches=1, using=using)
    return found


def know_tasks(app: Celery) -> None:
    """Import the tasks' code, where a process is no worker.

    Only it says which results are kept, and which messages without an entry are a durable task's.
    """
    try:
        app.loader.import_default_modules()
    except Exception as error:  # to publish and to sweep takes no code
        logger.warning("outbox.tasks.unknown: %s: %s", type(error).__name__, error)


def everywhere(work: Callable[[str], object]) -> None:
    """Do `work` in each database that has an outbox: one that is away keeps no other waiting.

    Raises:
        DatabaseError, InterfaceError: what the last one that was away said, after all the others.
    """
    away: Exception | None = None
    for using in settings().DATABASES:
        try:
            work(using)
        except AWAY as error:
            logger.warning("outbox.database.away in a tick of %s: %s", using, error)
            connections[using].close()
            away = error
    if away is not None:
        raise away


def would_reconcile(app: Celery, *, using: str, remove: bool = False) -> Found:
    """What a pass would find and do. Changes nothing, so that any number may run at once."""
    return asdict(reconciling.reconcile(app, using=using, dry=True, remove=remove))


def prune(*, using: str) -> Found | None:
    """Delete what is past its retention. None: another process is at it."""

    def work(renew: Renew) -> Found:
        return {"pruned": 0, **part("prune", lambda: _prune(using, renew), using=using)}

    return ticks.run_alone(ticks.PRUNE, work, lease=_PRUNE_LEASE, using=using)


def _prune(using: str, renew: Renew) -> dict[str, int]:
    return {"pruned": pruning.prune(using=using, renew=renew)}

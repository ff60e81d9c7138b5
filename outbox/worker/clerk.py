"""The clerk: a thread of the worker's main process that keeps the leases of what the worker runs.

It starts before the pool and stops after it. Whatever the database or the broker do, it goes on:
a lease that it could not renew is renewed when the database is back.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import bootsteps
from celery.signals import beat_init, worker_init
from django.db import DatabaseError, InterfaceError, connections

from outbox import maintenance, outage, ticks, transitions, workers
from outbox.conf import settings
from outbox.errors import ConfigurationError
from outbox.lifecycle import lease
from outbox.worker import identity
from outbox.worker.children import is_gone
from outbox.worker.request import note_pool
from outbox.worker.runs import CalledOff, received, runs
from outbox.worker.stopping import is_stopping

logger = logging.getLogger("outbox")

LOOK_EVERY = 0.1  # seconds: how soon a dead child is seen
AGAIN = 0.5  # seconds: after a piece of work that failed
LATE = 3  # ticks that everybody else may miss before the clerk does them


# The pool forks from another thread. A child that is forked while the clerk is inside libpq
# inherits locks of C libraries that nobody will ever release, and hangs in its first connection.
_at_work = threading.Lock()
_PATIENCE = 5.0  # seconds that a fork waits for the clerk: a database that hangs must not stop it


def _hold_the_clerk() -> None:
    _held.acquired = _at_work.acquire(timeout=_PATIENCE)


def _let_the_clerk_go() -> None:
    if getattr(_held, "acquired", False):
        _held.acquired = False
        _at_work.release()


_held = threading.local()
os.register_at_fork(
    before=_hold_the_clerk, after_in_parent=_let_the_clerk_go, after_in_child=_let_the_clerk_go
)


class Clerk(threading.Thread):
    """Renews, sees dead children, and does the ticks when nobody else does."""

    def __init__(self, worker: Any) -> None:
        super().__init__(name="outbox-clerk", daemon=True)
        self.worker, self.app = worker, worker.app
        self.stopped = threading.Event()
        self.due: dict[str, float] = {}
        self.behind: set[str] = set()  # where the last batch was full: there is more to publish

    def run(self) -> None:
        # Each database for itself: one that is away must not cost another its leases.
        for using in settings().DATABASES:
            self._try("sweep", partial(lease.sweep, using=using))
        while not self.stopped.wait(LOOK_EVERY):
            self._try("see to the dead", self._see_to_the_dead)
            for using in settings().DATABASES:
                self._renew_and_tick(using)
        self._try("see to the dead", self._see_to_the_dead)
        for using in settings().DATABASES:
            self._try("sign off", partial(workers.sign_off, using=using))
        connections.close_all()

    def _renew_and_tick(self, using: str) -> None:
        pause = LOOK_EVERY if using in self.behind else settings().DISPATCH_EVERY
        self._every(f"renew {using}", settings().LEASE / 3, partial(self._renew, using))
        self._every(f"ticks {using}", pause, partial(self._do_late_ticks, using))

    def _every(self, name: str, seconds: float, work: Callable[[], Any]) -> None:
        now = time.monotonic()
        if now >= self.due.get(name, 0):
            # After a failure soon again, not a third of a lease later.
            self.due[name] = now + (seconds if self._try(name, work) else AGAIN)

    def _try(self, name: str, work: Callable[[], Any]) -> bool:
        try:
            with _at_work:
                work()
        except Exception as error:  # a thread that dies in silence would lose every lease
            if isinstance(error, DatabaseError | InterfaceError):
                outage.note_trouble()
            logger.warning("outbox.clerk.failed %s: %s", name, error)
            connections.close_all()
            return False
        return True

    def _renew(self, using: str) -> None:
        ids = {run.entry_id for run in runs.alive() if run.using == using}
        if ids:
            transitions.renew(ids, owner=identity.BOOT, lease=settings().LEASE, using=using)
        workers.beat(self.worker, holds=received.ids(), using=using)

    def _see_to_the_dead(self) -> None:
        """A child that is gone ends its run at once: as a crash, a timeout, or a release."""
        gone = [run for run in runs.alive() if is_gone(run.pid)]
        for run in gone:
            lease.end_lost_run(
                run.entry_id,
                pid=run.pid,
                owner=identity.BOOT,
                verdict=runs.verdict(run) or (CalledOff() if is_stopping() else None),
                using=run.using,
            )
            runs.end(run)
        if gone:
            self._wake_the_pool()

    def _wake_the_pool(self) -> None:
        """The pool's own look at its children is up to five seconds away."""
        hub: Any = getattr(self.worker, "hub", None)
        pool: Any = getattr(self.worker.pool, "_pool", None)
        if hub is not None and hasattr(pool, "maintain_pool"):
            hub.call_soon(pool.maintain_pool)

    def _do_late_ticks(self, using: str) -> None:
        if using in self.behind or self._is_late(ticks.DISPATCH, settings().DISPATCH_EVERY, using):
            # One batch a look: a backlog must not keep the leases waiting.
            found = maintenance.dispatch(self.app, batches=1, using=using)
            full = found.get("published", 0) >= settings().BATCH_SIZE
            (self.behind.add if full else self.behind.discard)(using)
        if self._is_late(ticks.RECONCILE, settings().RECONCILE_EVERY, using):
            maintenance.reconcile(self.app, using=using)

    def _is_late(self, name: str, every: float, using: str) -> bool:
        return ticks.is_late(name, LATE * every, using=using)


class ClerkStep(bootsteps.StartStopStep):
    """The bootstep. In front of all others: it starts before the pool and stops after it."""

    def include(self, parent: Any) -> bool:
        parent.steps.insert(0, self)
        return True

    def start(self, parent: Any) -> None:
        note_pool(prefork="prefork" in parent.pool_cls.__module__)
        self.clerk = Clerk(parent)
        self.clerk.start()

    def stop(self, parent: Any) -> None:
        self.clerk.stopped.set()
        self.clerk.join(timeout=LOOK_EVERY + settings().PUBLISH_TIMEOUT + 5)

    terminate = stop


def employ() -> None:
    """Give every worker that starts in this process a clerk, and beat a look at the settings."""
    worker_init.connect(_add_step, weak=False)
    beat_init.connect(_refuse_bad_settings, weak=False)


def _add_step(sender: Any, **_: Any) -> None:
    _refuse_bad_settings()
    sender.app.steps["worker"].add(ClerkStep)


def _refuse_bad_settings(**_: Any) -> None:
    """A worker or beat that cannot work must not start. Celery swallows anything but an exit."""
    try:
        settings()
    except ConfigurationError as error:
        raise SystemExit(f"celery-outbox: {error}") from error

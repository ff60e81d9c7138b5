"""The clerk: a thread of the worker's main process that keeps the leases of what the worker runs.

It starts before the pool and stops after it. Whatever the database or the broker do, it goes on:
a lease that it could not renew is renewed when the database is back.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from celery import bootsteps
from celery.signals import beat_init, worker_init
from django.db import DatabaseError, InterfaceError, connections

from outbox import maintenance, outage, ticks, transitions, workers
from outbox.conf import settings
from outbox.errors import ConfigurationError
from outbox.lifecycle import lease
from outbox.worker import identity, inbox, pools
from outbox.worker.children import is_gone
from outbox.worker.runs import CalledOff, received, runs
from outbox.worker.stopping import is_stopping

logger = logging.getLogger("outbox")

LOOK_EVERY = 0.1  # seconds: how soon a dead child is seen
AGAIN = 0.5  # seconds: after a piece of work that failed
GRACE = 5.0  # seconds that a child has to heed SIGTERM at a cold shutdown
LATE = 3  # ticks that everybody else may miss before the clerk does them

T = TypeVar("T")


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
    """Renews, sees dead children, decides on strays, and does the ticks when nobody else does."""

    def __init__(self, worker: Any) -> None:
        super().__init__(name="outbox-clerk", daemon=True)
        self.worker, self.app = worker, worker.app
        self.stopped = threading.Event()
        self.due: dict[str, float] = {}  # when each piece of work is to be done next, monotonic
        self.owed: dict[str, list[float]] = defaultdict(list)  # when its own repairs fall due

    def run(self) -> None:
        # Each database for itself: one that is away must not cost another its leases.
        for using in settings().DATABASES:
            self._try("sweep", partial(lease.sweep, using=using))
        # What runs on while the pool stops keeps its lease.
        while not self.stopped.wait(LOOK_EVERY) or runs.alive():
            self._look()
        self._look()
        for using in settings().DATABASES:
            self._try("sign off", partial(workers.sign_off, using=using))
        connections.close_all()

    def _look(self) -> None:
        self._kill_the_deaf()
        self._try("see to the dead", self._see_to_the_dead)
        self._every("inbox", LOOK_EVERY, inbox.work_off)
        for using in settings().DATABASES:
            self._every(f"renew {using}", settings().LEASE / 3, partial(self._renew, using))
            self._every(f"owed {using}", LOOK_EVERY, partial(self._dispatch_owed, using))
            if not self.stopped.is_set():
                self._at_its_time(f"dispatch {using}", partial(self._dispatch_if_late, using))
                self._at_its_time(f"reconcile {using}", partial(self._reconcile_if_late, using))

    def _every(self, name: str, seconds: float, work: Callable[[], Any]) -> None:
        def then() -> float:
            work()
            return seconds

        self._at_its_time(name, then)

    def _at_its_time(self, name: str, work: Callable[[], float]) -> None:
        """Do `work` when it is due; it says in how many seconds it is due again."""
        if time.monotonic() < self.due.get(name, 0):
            return
        pause = self._try(name, work)
        # After a failure soon again, not a third of a lease later.
        self.due[name] = time.monotonic() + (AGAIN if pause is None else pause)

    def _try(self, name: str, work: Callable[[], T]) -> T | None:
        try:
            with _at_work:
                return work()
        except Exception as error:  # a thread that dies in silence would lose every lease
            if isinstance(error, DatabaseError | InterfaceError):
                outage.note_trouble()
            logger.warning("outbox.clerk.failed %s: %s", name, error)
            connections.close_all()
            return None

    def _renew(self, using: str) -> None:
        ids = {run.entry_id for run in runs.alive() if run.using == using}
        if ids:
            transitions.renew(ids, owner=identity.BOOT, lease=pools.lease(), using=using)
        workers.beat(self.worker, holds=received.ids(), using=using)

    def _kill_the_deaf(self) -> None:
        """Celery waits without end for a child that was told to end and does not."""
        for run in runs.alive():
            verdict = runs.verdict(run)
            called_off = verdict.at if isinstance(verdict, CalledOff) else math.inf
            if run.pid != os.getpid() and time.monotonic() > called_off + GRACE:
                logger.warning("outbox.run.killed entry_id=%s pid=%s", run.entry_id, run.pid)
                with suppress(ProcessLookupError):
                    os.kill(run.pid, signal.SIGKILL)

    def _see_to_the_dead(self) -> None:
        """A child that is gone ends its run at once: as a crash, a timeout, or a release."""
        gone = [run for run in runs.alive() if is_gone(run.pid)]
        for run in gone:
            again = lease.end_lost_run(
                run.entry_id,
                pid=run.pid,
                owner=identity.BOOT,
                verdict=runs.verdict(run) or (CalledOff() if is_stopping() else None),
                using=run.using,
            )
            runs.end(run)
            if again is not None:
                self.owed[run.using].append(time.monotonic() + again.total_seconds())
        if gone:
            self._wake_the_pool()

    def _wake_the_pool(self) -> None:
        """The pool's own look at its children is up to five seconds away."""
        hub: Any = getattr(self.worker, "hub", None)
        pool: Any = getattr(self.worker.pool, "_pool", None)
        if hub is not None and hasattr(pool, "maintain_pool"):
            hub.call_soon(pool.maintain_pool)

    def _dispatch_owed(self, using: str) -> None:
        """What the clerk itself made due again is published when it is, whoever else dispatches."""
        now = time.monotonic()
        if any(at <= now for at in self.owed[using]):
            maintenance.dispatch(self.app, batches=1, using=using)
            self.owed[using] = [at for at in self.owed[using] if at > now]

    def _dispatch_if_late(self, using: str) -> float:
        limit = LATE * settings().DISPATCH_EVERY
        if wait := ticks.late_in(ticks.DISPATCH, limit, using=using):
            return wait
        # One batch a look: a backlog must not keep the leases waiting.
        found = maintenance.dispatch(self.app, batches=1, using=using)
        return LOOK_EVERY if found.get("published", 0) >= settings().BATCH_SIZE else limit

    def _reconcile_if_late(self, using: str) -> float:
        limit = LATE * settings().RECONCILE_EVERY
        if wait := ticks.late_in(ticks.RECONCILE, limit, using=using):
            return wait
        maintenance.reconcile(self.app, using=using)
        return limit


class ClerkStep(bootsteps.StartStopStep):
    """The bootstep. In front of all others: it starts before the pool and stops after it."""

    def include(self, parent: Any) -> bool:
        parent.steps.insert(0, self)
        return True

    def start(self, parent: Any) -> None:
        pools.note(parent.pool_cls)
        self.clerk = Clerk(parent)
        self.clerk.start()

    def stop(self, parent: Any) -> None:
        """The pool has stopped. What it could not end goes on: threads until they are done."""
        for run in runs.alive():
            if run.pid != os.getpid() and runs.verdict(run) is None:
                runs.judge(run, CalledOff())  # it dies with this process, or by the clerk's hand
        self.clerk.stopped.set()
        while runs.alive() and self.clerk.is_alive():
            self.clerk.join(timeout=LOOK_EVERY)
        self.clerk.join(timeout=LOOK_EVERY + settings().PUBLISH_TIMEOUT + 5)

    terminate = stop


def employ() -> None:
    """Give every worker that starts in this process a clerk, and beat a look at the settings."""
    worker_init.connect(_add_step, weak=False)
    beat_init.connect(_refuse_bad_settings, weak=False)


def _add_step(sender: Any, **_: Any) -> None:
    from outbox.worker import control  # noqa: F401  # its commands: Celery's own must be there
    from outbox.worker.consumer import ConsumerStep

    _refuse_bad_settings()
    sender.app.steps["worker"].add(ClerkStep)
    sender.app.steps["consumer"].add(ConsumerStep)


def _refuse_bad_settings(**_: Any) -> None:
    """A worker or beat that cannot work must not start. Celery swallows anything but an exit."""
    try:
        settings()
    except ConfigurationError as error:
        raise SystemExit(f"celery-outbox: {error}") from error

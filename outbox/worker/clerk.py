"""The clerk: a thread of the worker's main process that keeps the leases of what the worker runs.

It starts before the pool and stops after it. Whatever the database or the broker do, it goes on:
a lease that it could not renew is renewed when the database is back.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from contextlib import suppress
from functools import partial
from typing import Any

from celery import bootsteps
from celery.signals import beat_init, worker_init

from outbox import transitions, workers
from outbox.conf import settings
from outbox.errors import ConfigurationError
from outbox.lifecycle import lease
from outbox.worker import identity, inbox, pools
from outbox.worker.children import is_gone
from outbox.worker.rounds import LOOK_EVERY, Rounds
from outbox.worker.runs import CalledOff, Run, received, runs
from outbox.worker.stopping import is_stopping
from outbox.worker.ticker import Ticker

logger = logging.getLogger("outbox")

GRACE = 5.0  # seconds that a child has to heed SIGTERM at a cold shutdown
PARTING = 7.0  # seconds that a worker waits for its clerk's last words: a database may hang


class Clerk(Rounds):
    """Renews, sees dead children, and does what the event loop hands to it."""

    def __init__(self, worker: Any, *, ticker: Ticker) -> None:
        super().__init__("outbox-clerk")
        self.worker, self.ticker = worker, ticker

    def run(self) -> None:
        # Each database for itself, here and below: one that is away costs no other its leases.
        for using in settings().DATABASES:
            self.attempt("sweep", partial(lease.sweep, using=using))
        super().run()

    def is_needed(self) -> bool:
        """What runs on while the pool stops keeps its lease."""
        return bool(runs.alive())

    def look(self) -> None:
        self._kill_the_deaf()
        self.attempt("see to the dead", self._see_to_the_dead)
        self.every(LOOK_EVERY, "inbox", inbox.work_off)
        for using in settings().DATABASES:
            self.every(settings().LEASE / 3, f"renew {using}", partial(self._renew, using))

    def close(self) -> None:
        for using in settings().DATABASES:
            self.attempt("sign off", partial(workers.sign_off, using=using))

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
            self._end(run)
        if gone:
            self._wake_the_pool()

    def _end(self, run: Run) -> None:
        again = lease.end_lost_run(
            run.entry_id,
            pid=run.pid,
            owner=identity.BOOT,
            verdict=runs.verdict(run) or (CalledOff() if is_stopping() else None),
            using=run.using,
        )
        runs.end(run)
        if again is not None:
            self.ticker.owe_dispatch(again.total_seconds(), run.using)

    def _wake_the_pool(self) -> None:
        """The pool's own look at its children is up to five seconds away."""
        hub: Any = getattr(self.worker, "hub", None)
        pool: Any = getattr(self.worker.pool, "_pool", None)
        if hub is not None and hasattr(pool, "maintain_pool"):
            hub.call_soon(pool.maintain_pool)


class ClerkStep(bootsteps.StartStopStep):
    """The bootstep. In front of all others: it starts before the pool and stops after it."""

    def include(self, parent: Any) -> bool:
        parent.steps.insert(0, self)
        return True

    def start(self, parent: Any) -> None:
        pools.note(parent.pool_cls)
        self.ticker = Ticker(parent.app)
        self.clerk = Clerk(parent, ticker=self.ticker)
        self.clerk.start()
        self.ticker.start()

    def stop(self, parent: Any) -> None:
        """The pool has stopped. What it could not end goes on: threads until they are done."""
        for run in runs.alive():
            if run.pid != os.getpid() and runs.verdict(run) is None:
                runs.judge(run, CalledOff())  # it dies with this process, or by the clerk's hand
        self.clerk.stopped.set()
        while runs.alive() and self.clerk.is_alive():
            self.clerk.join(timeout=LOOK_EVERY)
        self.clerk.join(timeout=PARTING)
        self.ticker.stopped.set()
        self.ticker.join(timeout=PARTING)

    terminate = stop


def employ() -> None:
    """Give every worker that starts in this process a clerk, and beat a look at the settings."""
    worker_init.connect(_add_steps, weak=False)
    beat_init.connect(_refuse_bad_settings, weak=False)


def _add_steps(sender: Any, **_: Any) -> None:
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

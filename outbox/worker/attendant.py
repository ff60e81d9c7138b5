"""Beside the clerk: sees children that are gone, and does what the event loop hands over.

A thread of its own, since it writes rows that somebody may hold, and must cost no run its lease.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from outbox import transitions
from outbox.conf import settings
from outbox.lifecycle import lease
from outbox.worker import identity, inbox
from outbox.worker.children import is_gone
from outbox.worker.rounds import LOOK_EVERY, Rounds
from outbox.worker.runs import CalledOff, Run, runs
from outbox.worker.stopping import is_stopping
from outbox.worker.ticker import Ticker

logger = logging.getLogger("outbox")

PATIENCE = 5.0  # seconds, at least: a statement may wait 2 for a row that somebody holds
GRACE = 5.0  # seconds that a child has to heed SIGTERM at a cold shutdown


class Attendant(Rounds):
    """Ends the runs of dead children at once, each for itself: a row that is held waits alone."""

    def __init__(self, worker: Any, *, ticker: Ticker) -> None:
        super().__init__("outbox-attendant", patience=max(settings().LEASE / 3, PATIENCE))
        self.worker, self.ticker = worker, ticker
        self._killed: set[Run] = set()

    def open(self) -> None:
        # Each database for itself: one that is away must not keep the others from their sweep.
        for using in settings().DATABASES:
            self.attempt(f"sweep {using}", partial(lease.sweep, using=using))

    def is_needed(self) -> bool:
        return bool(runs.alive())

    def look(self) -> None:
        alive = runs.alive()
        gone = [run for run in alive if is_gone(run.pid)]
        for run in gone:
            self.at_its_time(f"end {run.entry_id}", partial(self._end, run))
        if any(run not in runs.alive() for run in gone):
            self._wake_the_pool()
        self._kill_the_deaf([run for run in alive if run not in gone])
        self.every(LOOK_EVERY, "inbox", inbox.work_off)

    def _end(self, run: Run) -> float:
        """A child that is gone ends its run: as a crash, a timeout, or a release."""
        with transitions.short_of_patience(using=run.using):
            again = lease.end_lost_run(
                run.entry_id,
                pid=run.pid,
                owner=identity.BOOT,
                verdict=runs.verdict(run) or (CalledOff() if is_stopping() else None),
                using=run.using,
            )
        runs.end(run)
        self._killed.discard(run)
        if again is not None:
            self.ticker.owe_dispatch(again / timedelta(seconds=1), run.using)
        return 0.0

    def _kill_the_deaf(self, alive: list[Run]) -> None:
        """Celery waits without end for a child that was told to end and does not."""
        for run in alive:
            verdict = runs.verdict(run)
            if not isinstance(verdict, CalledOff) or time.monotonic() < verdict.at + GRACE:
                continue
            if run.pid != os.getpid() and run not in self._killed:
                self._killed.add(run)
                logger.warning("outbox.run.killed entry_id=%s pid=%s", run.entry_id, run.pid)
                with suppress(ProcessLookupError):
                    os.kill(run.pid, signal.SIGKILL)

    def _wake_the_pool(self) -> None:
        """The pool's own look at its children is up to five seconds away."""
        hub: Any = getattr(self.worker, "hub", None)
        pool: Any = getattr(self.worker.pool, "_pool", None)
        if hub is not None and hasattr(pool, "maintain_pool"):
            hub.call_soon(pool.maintain_pool)

"""The clerk: a thread in the worker's main process that keeps the leases of what the worker runs.

It starts before the pool and stops after it. Whatever the database or the broker do, it goes on:
a lease that it could not renew is renewed when the database is back.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from celery import bootsteps
from celery.signals import beat_init, worker_init
from django.db import connections

from outbox import contact, transitions, workers
from outbox.conf import settings
from outbox.errors import ConfigurationError
from outbox.worker import identity, pools
from outbox.worker.attendant import Attendant
from outbox.worker.rounds import LOOK_EVERY, Rounds
from outbox.worker.runs import CalledOff, received, runs
from outbox.worker.ticker import Ticker

PATIENCE = 2.0  # seconds, at least: a server that is only busy is to be waited for
PARTING = 7.0  # seconds that a worker waits for its clerk's last words: a database may hang


class Clerk(Rounds):
    """Renews, and says that the worker is alive; nothing else may hold it up.

    One for each database: one that is away or silent costs no other its leases.
    """

    def __init__(self, worker: Any, using: str) -> None:
        # A renewal over a new connection, a third of a lease after the one that nobody answered.
        super().__init__(f"outbox-clerk {using}", patience=max(settings().LEASE / 3, PATIENCE))
        self.worker, self.using = worker, using

    def is_needed(self) -> bool:
        """What runs on while the pool stops keeps its lease."""
        return bool(runs.alive())

    def look(self) -> None:
        self.every(settings().LEASE / 3, f"renew {self.using}", self._renew)

    def close(self) -> None:
        connections.close_all()  # an old one may be silent, and the worker does not wait long now
        self.attempt(f"sign off {self.using}", partial(workers.sign_off, using=self.using))

    def _renew(self) -> None:
        using = self.using
        contact.leave_word(using=using)
        ids = {run.entry_id for run in runs.alive() if run.using == using}
        if ids:
            transitions.renew(ids, owner=identity.BOOT, lease=pools.lease(), using=using)
        workers.beat(self.worker, holds=received.ids(), using=using)


class ClerkStep(bootsteps.StartStopStep):
    """The bootstep. In front of all others: it starts before the pool and stops after it."""

    def include(self, parent: Any) -> bool:
        parent.steps.insert(0, self)
        return True

    def start(self, parent: Any) -> None:
        pools.note(parent.pool_cls)
        self.ticker = Ticker(parent.app)
        self.attendant = Attendant(parent, ticker=self.ticker)
        self.clerks = [Clerk(parent, using) for using in settings().DATABASES]
        for thread in (*self.clerks, self.attendant, self.ticker):
            thread.start()

    def stop(self, parent: Any) -> None:
        """The pool has stopped. What it could not end goes on: threads until they are done."""
        for run in runs.alive():
            if run.pid != os.getpid() and runs.verdict(run) is None:
                runs.judge(run, CalledOff())  # it dies with this process, or by the clerk's hand
        # In this order: what the attendant gives back, the ticker publishes.
        for thread in (self.attendant, *self.clerks, self.ticker):
            thread.stopped.set()
            while runs.alive() and thread.is_alive():
                thread.join(timeout=LOOK_EVERY)
            thread.join(timeout=PARTING)

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

"""The dispatcher as a process of its own, for those who run no celery-beat."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

from celery import Celery
from django.db import connections

from outbox import maintenance, silence
from outbox.conf import settings
from outbox.outage import LONGEST_PAUSE
from outbox.silence import Patience

logger = logging.getLogger("outbox")

PRUNE_EVERY = 3600.0  # seconds


class Dispatcher:
    """Does all ticks, each at its own pace, until it is told to stop, through any outage."""

    def __init__(self, app: Celery, databases: Collection[str]) -> None:
        self.app, self.databases = app, databases
        self.stopped = threading.Event()
        self._patience = Patience(silence.LONG)  # of what it is at
        self._grown: dict[str, Patience] = {}  # of each database that was away
        self.last: dict[str, float] = {}

    def stop(self, signum: int = 0, frame: FrameType | None = None) -> None:
        self.stopped.set()

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.stop)
        maintenance.know_tasks(self.app)
        connections.close_all()  # the bound begins with a new one
        silence.bound_all(lambda: self._patience)
        logger.info("outbox.dispatcher.ready every %g s", settings().DISPATCH_EVERY)
        while not self.stopped.is_set():
            pause = settings().DISPATCH_EVERY if self._round() else LONGEST_PAUSE
            self.stopped.wait(pause)
        logger.info("outbox.dispatcher.stopped")

    def _round(self) -> bool:
        """One pass over each database. False: one of them was away."""
        answered = [self._once(using) for using in self.databases]  # each, whatever the others say
        return all(answered)

    def _once(self, using: str) -> bool:
        self._patience = self._grown.pop(using, Patience(silence.LONG))
        try:
            maintenance.dispatch(self.app, using=using)
            self._at_most("reconcile", using, settings().RECONCILE_EVERY, self._reconcile)
            self._at_most("prune", using, PRUNE_EVERY, maintenance.prune)
        except maintenance.AWAY as error:
            logger.warning("outbox.database.away while dispatching: %s", error)
            self._grown[using] = self._patience
            connections[using].close()
            return False
        return True

    def _reconcile(self, *, using: str) -> Any:
        return maintenance.recover(self.app, using=using)

    def _at_most(self, name: str, using: str, every: float, work: Callable[..., Any]) -> None:
        now, key = time.monotonic(), f"{name} {using}"
        if now - self.last.get(key, now - every) >= every:
            self.last[key] = now
            work(using=using)

"""The dispatcher as a process of its own, for those who run no celery-beat."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Collection
from types import FrameType

from celery import Celery
from django.db import DatabaseError, InterfaceError, connections

from outbox import maintenance
from outbox.conf import settings
from outbox.outage import LONGEST_PAUSE

logger = logging.getLogger("outbox")

# Everything that the database or a driver's broken socket may raise while it is away.
_AWAY = (DatabaseError, InterfaceError)


class Dispatcher:
    """Dispatches every `DISPATCH_EVERY` seconds until it is told to stop, through any outage."""

    def __init__(self, app: Celery, databases: Collection[str]) -> None:
        self.app, self.databases = app, databases
        self.stopped = threading.Event()

    def stop(self, signum: int = 0, frame: FrameType | None = None) -> None:
        self.stopped.set()

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.stop)
        logger.info("outbox.dispatcher.ready every %g s", settings().DISPATCH_EVERY)
        while not self.stopped.is_set():
            pause = settings().DISPATCH_EVERY if self._round() else LONGEST_PAUSE
            self.stopped.wait(pause)
        logger.info("outbox.dispatcher.stopped")

    def _round(self) -> bool:
        """One pass over each database. False: one of them was away."""
        answered = [self.once(using) for using in self.databases]
        return all(answered)

    def once(self, using: str) -> bool:
        try:
            maintenance.dispatch(self.app, using=using)
        except _AWAY as error:
            logger.warning("outbox.database.away while dispatching: %s", error)
            connections[using].close()
            return False
        return True

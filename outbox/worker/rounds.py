"""A thread of the worker's main process that does each piece of its work when that is due."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from django.db import connections

from outbox import silence
from outbox.silence import Patience
from outbox.worker import forks

logger = logging.getLogger("outbox")

LOOK_EVERY = 0.1  # seconds: how often it asks what is due
AGAIN = 0.5  # seconds: after a piece of work that failed

T = TypeVar("T")


class Rounds(threading.Thread):
    """Goes round until it is stopped, whatever the database or the broker do."""

    def __init__(self, name: str, *, patience: float) -> None:
        """`patience`: seconds that it waits for the answer to a statement, at first."""
        super().__init__(name=name, daemon=True)
        self._first = patience
        self._patience = Patience(patience)  # of what it is at
        self._grown: dict[str, Patience] = {}  # of what has failed
        self.stopped = threading.Event()
        self._due: dict[str, float] = {}  # monotonic
        self._turn = forks.turn()

    def run(self) -> None:
        silence.bound_all(lambda: self._patience)
        self.open()
        while not self.stopped.is_set() or self.is_needed():
            self.look()
            time.sleep(LOOK_EVERY)
        self.look()
        self.close()
        connections.close_all()

    def open(self) -> None:
        """The first thing that it does."""

    def look(self) -> None:
        """Do what is due now."""
        raise NotImplementedError

    def is_needed(self) -> bool:
        """Whether it must go on though it was told to stop."""
        return False

    def close(self) -> None:
        """The last thing that it does."""

    def every(self, seconds: float, name: str, work: Callable[[], object]) -> None:
        """Do `work` so often."""

        def then() -> float:
            work()
            return seconds

        self.at_its_time(name, then)

    def at_its_time(self, name: str, work: Callable[[], float]) -> None:
        """Do `work` when it is due; it says in how many seconds it is due again."""
        if time.monotonic() < self._due.get(name, 0):
            return
        pause = self.attempt(name, work)
        pause = AGAIN if pause is None else pause
        self._due[name] = time.monotonic() + pause
        if not pause:  # done for good, or due again at once
            del self._due[name]

    def attempt(self, name: str, work: Callable[[], T]) -> T | None:
        """Do `work` now. A thread that dies in silence would lose every lease: it never raises."""
        self._patience = self._grown.pop(name, Patience(self._first))
        try:
            with self._turn:
                return work()
        except Exception as error:
            logger.warning("outbox.clerk.failed %s: %s", name, error)
            self._grown[name] = self._patience
            connections.close_all()
            return None

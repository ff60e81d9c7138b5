"""The clerk's second pair of hands: the ticks, when nobody else does them.

A thread of its own, since a look at a deep queue takes seconds, and must cost no run its lease.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

from outbox import maintenance, ticks
from outbox.conf import settings
from outbox.silence import LONG
from outbox.worker.rounds import LOOK_EVERY, Rounds

LATE = 3  # ticks that everybody else may miss


class Ticker(Rounds):
    """Dispatches what the clerk made due, and does dispatch and reconcile when they are late."""

    def __init__(self, app: Any) -> None:
        super().__init__("outbox-ticker", patience=LONG)
        self.app = app
        self._lock = threading.Lock()
        self._owed: list[tuple[float, str]] = []  # when (monotonic), and in which database

    def owe_dispatch(self, seconds: float, using: str) -> None:
        """An entry falls due then that the clerk itself gave back: wait for nobody's tick."""
        with self._lock:
            self._owed.append((time.monotonic() + seconds, using))

    def look(self) -> None:
        for using in settings().DATABASES:
            self.every(LOOK_EVERY, f"owed {using}", partial(self._dispatch_owed, using))
            if not self.stopped.is_set():
                self.at_its_time(f"dispatch {using}", partial(self._dispatch_if_late, using))
                self.at_its_time(f"reconcile {using}", partial(self._reconcile_if_late, using))

    def _dispatch_owed(self, using: str) -> None:
        now = time.monotonic()
        with self._lock:
            due = [owed for owed in self._owed if owed[0] <= now and owed[1] == using]
        if due:
            maintenance.dispatch(self.app, batches=1, using=using)
        with self._lock:
            self._owed = [owed for owed in self._owed if owed not in due]

    def _dispatch_if_late(self, using: str) -> float:
        limit = LATE * settings().DISPATCH_EVERY
        if wait := ticks.late_in(ticks.DISPATCH, limit, using=using):
            return wait
        # One batch a look: a backlog must not keep the other databases waiting.
        found = maintenance.dispatch(self.app, batches=1, using=using)
        return LOOK_EVERY if found.get("published", 0) >= settings().BATCH_SIZE else limit

    def _reconcile_if_late(self, using: str) -> float:
        limit = LATE * settings().RECONCILE_EVERY
        if wait := ticks.late_in(ticks.RECONCILE, limit, using=using):
            return wait
        maintenance.recover(self.app, using=using)
        return limit

"""The runs that this worker's main process knows to be alive: (entry, child), in every pool.

Celery's own sets leak and empty early, so the requests tell this register when they begin and end.
"""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any
from uuid import UUID


@dataclass(frozen=True)
class Run:
    """A run of an entry in a process. A redelivered copy in another child is another run."""

    entry_id: UUID
    pid: int
    using: str
    delivery: int = field(default_factory=count().__next__)  # in threads the PIDs are the same


@dataclass(frozen=True)
class TimedOut:
    """The run met its hard time limit: a failure."""

    limit: float
    delay: timedelta
    budget: int | None  # how many failures its task allows; None: any number


@dataclass(frozen=True)
class CalledOff:
    """The worker itself ends the run, at a shutdown or because its broker is gone: a release."""

    at: float = field(default_factory=time.monotonic, compare=False)


Verdict = TimedOut | CalledOff


class Runs:
    """A register that the event loop and the clerk's thread share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[Run, Verdict | None] = {}

    def begin(self, run: Run) -> None:
        with self._lock:
            self._runs[run] = None

    def judge(self, run: Run, verdict: Verdict) -> None:
        """Note why its child is about to die: it counts once the child is gone."""
        with self._lock:
            if run in self._runs:
                self._runs[run] = verdict

    def end(self, run: Run) -> bool:
        """False: somebody else has ended it already."""
        with self._lock:
            return self._runs.pop(run, _MISSING) is not _MISSING

    def verdict(self, run: Run) -> Verdict | None:
        with self._lock:
            return self._runs.get(run)

    def alive(self) -> list[Run]:
        with self._lock:
            return list(self._runs)


class Received:
    """The deliveries that this worker has and has not settled: also those that wait for a rate.

    Celery's `reserved_requests` leaves the rate-limited out. Held weakly, since a lost connection
    drops requests without a word.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, request: Any) -> None:
        with self._lock:
            self._requests.add(request)

    def discard(self, request: Any) -> None:
        with self._lock:
            self._requests.discard(request)

    def ids(self) -> list[str]:
        with self._lock:
            return sorted({str(request.id) for request in self._requests})


_MISSING = CalledOff()
runs = Runs()
received = Received()

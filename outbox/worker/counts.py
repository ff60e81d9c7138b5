"""How many deliveries this worker has not run, by reason: told with its heartbeat."""

from __future__ import annotations

import threading
from collections import Counter

UNKNOWN_TASK = "unknown task"  # given back: its code is not here
UNREADABLE = "unreadable"  # no Celery message, or not one that can be decoded

_lock = threading.Lock()
_counts: Counter[str] = Counter()


def add(reason: str) -> None:
    with _lock:
        _counts[reason] += 1


def so_far() -> dict[str, int]:
    """Since this worker started."""
    with _lock:
        return dict(sorted(_counts.items()))

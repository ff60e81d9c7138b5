"""A fork waits for the threads of the main process that talk to the database.

The pool forks from another thread. A child that is forked while one of them is inside libpq
inherits locks of C libraries that nobody will ever release, and hangs in its first connection
(docs/decisions/0011-a-fork-waits-for-the-clerk.md).
"""

from __future__ import annotations

import os
import threading
import time

PATIENCE = 5.0  # seconds that a fork waits: a database that hangs must not stop it

_turns: list[threading.Lock] = []  # one for each such thread, held while it is at work
_held = threading.local()


def turn() -> threading.Lock:
    """A lock for a thread to hold while it is at work."""
    lock = threading.Lock()
    _turns.append(lock)
    return lock


def _wait_for_all() -> None:
    deadline = time.monotonic() + PATIENCE
    _held.locks = [
        lock for lock in _turns if lock.acquire(timeout=max(0.0, deadline - time.monotonic()))
    ]


def _let_go() -> None:
    for lock in getattr(_held, "locks", ()):
        lock.release()
    _held.locks = []


os.register_at_fork(before=_wait_for_all, after_in_parent=_let_go, after_in_child=_let_go)

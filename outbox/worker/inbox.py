"""What the event loop hands to the clerk, since it must not wait for a database itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from django.db import DatabaseError, InterfaceError

logger = logging.getLogger("outbox")

#: False: not yet, ask again at the next look.
Work = Callable[[], bool]

_lock = threading.Lock()
_waiting: list[Work] = []


def put(work: Work) -> None:
    """Have the clerk do `work`, again until it says that it is done."""
    with _lock:
        _waiting.append(work)


def work_off() -> None:
    """Do what waits. What met a database that is away, or a row that somebody holds, stays.

    Raises:
        DatabaseError, InterfaceError: the last of these troubles, once all were tried.
    """
    with _lock:
        taken = _waiting[:]
    trouble: Exception | None = None
    for work in taken:
        try:
            done = _is_done(work)
        except (DatabaseError, InterfaceError) as error:
            trouble, done = error, False
        if done:
            with _lock:
                _waiting.remove(work)
    if trouble is not None:
        raise trouble


def _is_done(work: Work) -> bool:
    try:
        return work()
    except (DatabaseError, InterfaceError):
        raise
    except Exception:  # a mistake in one must not keep the others waiting for ever
        logger.exception("outbox.clerk.dropped %r", work)
        return True

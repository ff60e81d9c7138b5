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
    """Do what waits. What met a database that is away stays, and so does what is behind it.

    Raises:
        DatabaseError, InterfaceError: the database is away.
    """
    with _lock:
        taken = _waiting[:]
    for work in taken:
        if _is_done(work):
            with _lock:
                _waiting.remove(work)


def _is_done(work: Work) -> bool:
    try:
        return work()
    except (DatabaseError, InterfaceError):
        raise
    except Exception:  # a mistake in one must not keep the others waiting for ever
        logger.exception("outbox.clerk.dropped %r", work)
        return True

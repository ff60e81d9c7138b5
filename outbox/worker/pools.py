"""Which kind of pool this worker has: what its PIDs mean, and what a busy job does to its clerk."""

from __future__ import annotations

from enum import Enum
from typing import Any

from outbox.conf import settings

# A greenlet that computes silences all others of its process, the clerk too, for as long as it
# does: a lease must outlast that. Nobody else's does, since threads and processes are preempted.
GREEN_FLOOR = 30.0  # seconds


class Kind(Enum):
    """How a pool runs its jobs."""

    CHILDREN = "children"  # prefork: each in a process of its own, which can be killed
    GREEN = "green"  # gevent, eventlet: greenlets of the main process, which can be killed
    INLINE = "inline"  # threads, solo: nothing can end them but themselves


_kind = Kind.INLINE


def note(pool_cls: Any) -> None:
    """Said once by the clerk, before the pool starts, so that its children know too."""
    global _kind
    if "prefork" in pool_cls.__module__:
        _kind = Kind.CHILDREN
    else:
        _kind = Kind.GREEN if getattr(pool_cls, "is_green", False) else Kind.INLINE


def kind() -> Kind:
    return _kind


def lease() -> float:
    """How long a claim or a renewal of this worker holds, in seconds."""
    configured = settings().LEASE
    return max(configured, GREEN_FLOOR) if _kind is Kind.GREEN else configured

"""The soft time limit's exception is raised in the body, never in a claim or an ending.

Its signal arrives wherever the child's main thread is. Outside the body it is only noted: an
ending that it broke off would be lost, or recorded twice.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNAL = getattr(signal, "SIGUSR1", None)  # billiard/pool.py, SIG_SOFT_TIMEOUT

_kept_out = False
_missed = False
_installed_in = 0  # a PID: the pool sets its own handler anew in each child
_theirs: Any = None


@contextmanager
def kept_out() -> Iterator[None]:
    """Around a whole delivery: nothing is raised in here but inside `let_in`."""
    global _kept_out, _missed
    _install()
    _kept_out, _missed = True, False
    try:
        yield
    finally:
        _kept_out = False


@contextmanager
def let_in() -> Iterator[None]:
    """Around the body."""
    global _kept_out
    _kept_out = False
    try:
        yield
    finally:
        _kept_out = True


def is_over() -> bool:
    """Whether the limit was met before the body began."""
    return _missed


def _install() -> None:
    global _installed_in, _theirs
    if _installed_in == os.getpid() or _SIGNAL is None:
        return
    _installed_in = os.getpid()
    if threading.current_thread() is not threading.main_thread():
        return  # threads know no time limits
    theirs = signal.getsignal(_SIGNAL)
    if callable(theirs):
        _theirs = theirs
        signal.signal(_SIGNAL, _handle)


def _handle(signum: int, frame: FrameType | None) -> None:
    global _missed
    if _kept_out:
        _missed = True
    else:
        _theirs(signum, frame)

"""Signals that ask this process to end, as exceptions, so that `with` blocks are left in order."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def signals_as_exit() -> Iterator[None]:
    """Unwind on SIGTERM and SIGHUP, where nobody else handles them."""

    def leave(signum: int, frame: FrameType | None) -> None:
        # A second one must not interrupt the stopping.
        signal.signal(signum, signal.SIG_IGN)
        raise SystemExit(128 + signum)

    in_main = threading.current_thread() is threading.main_thread()
    watched = (signal.SIGTERM, signal.SIGHUP) if in_main else ()
    ours = [each for each in watched if signal.getsignal(each) is signal.SIG_DFL]
    for each in ours:
        signal.signal(each, leave)
    try:
        yield
    finally:
        for each in ours:
            signal.signal(each, signal.SIG_DFL)

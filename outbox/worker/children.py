"""Whether a child is gone, without taking its exit status from the pool that waits for it."""

from __future__ import annotations

import os


def is_gone(pid: int) -> bool:
    """A zombie counts as gone: nothing of it runs any more. This process itself never is."""
    if pid == os.getpid():
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # the pool has waited for it, or it never was ours
        return True

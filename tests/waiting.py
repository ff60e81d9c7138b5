"""Waiting for a thing rather than for a time."""

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import psutil

T = TypeVar("T")


def wait_until(predicate: Callable[[], T], *, timeout: float = 15.0) -> T:
    """Ask until the answer is true, and return it; fail after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (answer := predicate()):
        assert time.monotonic() < deadline, f"waited {timeout:g} s in vain"
        time.sleep(0.01)
    return answer


def runs(pid: int) -> bool:
    """Whether a process has that PID and is not a zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: Iterable[int]) -> None:
    pids = list(pids)
    assert pids
    wait_until(lambda: not any(map(runs, pids)))

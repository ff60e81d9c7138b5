"""Whether this worker is shutting down, known to its children through memory shared by the fork."""

from __future__ import annotations

from multiprocessing.sharedctypes import RawValue
from typing import Any

from celery.signals import worker_shutting_down

_stopping = RawValue("b", 0)
_ending = RawValue("b", 0)


@worker_shutting_down.connect(weak=False)
def _note(how: str, **_: Any) -> None:
    _stopping.value = 1
    if how == "Cold":
        _ending.value = 1


def is_stopping() -> bool:
    return bool(_stopping.value)


def is_ending() -> bool:
    """It has already ended what it ran (a cold shutdown), so it is to begin nothing more.

    A read that was under way when Celery stopped consuming may still bring one more message, and
    in threads and gevent nobody would end that run: the worker would wait for it.
    """
    return bool(_ending.value)

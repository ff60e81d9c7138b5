"""Whether this worker is shutting down, known to its children through memory shared by the fork."""

from __future__ import annotations

from multiprocessing.sharedctypes import RawValue
from typing import Any

from celery.signals import worker_shutting_down

_flag = RawValue("b", 0)


@worker_shutting_down.connect(weak=False)
def _note(**_: Any) -> None:
    _flag.value = 1


def is_stopping() -> bool:
    return bool(_flag.value)

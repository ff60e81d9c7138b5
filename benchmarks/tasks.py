"""The tasks that are measured, each twice: as an obligation, and as plain late-acknowledged Celery.

That a body ran is a byte in a file and its start a line in a pipe: the same for both, and cheap.
"""

import os
import time
from functools import cache
from pathlib import Path

from celery import shared_task

from outbox.tasks import OutboxTask

RUNS = "BENCH_RUNS"  # environment: the file that gets a byte for each run
STARTS = "BENCH_STARTS"  # environment: the pipe that gets the time of each start
TIMES = "BENCH_TIMES"  # environment: settings of the outbox, as a dict's text


@cache
def _opened(variable: str) -> int:
    return os.open(os.environ[variable], os.O_WRONLY | os.O_APPEND)


def _noop(order: int) -> None:
    os.write(_opened(RUNS), b".")


def _started(order: int) -> None:
    now = time.monotonic_ns()
    os.write(_opened(STARTS), b"%d\n" % now)


owed_noop = shared_task(_noop, base=OutboxTask, name="bench.owed_noop", ignore_result=True)
plain_noop = shared_task(_noop, acks_late=True, name="bench.plain_noop", ignore_result=True)
owed_started = shared_task(_started, base=OutboxTask, name="bench.owed_start", ignore_result=True)
plain_started = shared_task(_started, acks_late=True, name="bench.plain_start", ignore_result=True)


@shared_task(base=OutboxTask, name="bench.idling", ignore_result=True)
def idling(seconds: float) -> None:
    time.sleep(seconds)


def hang() -> Path:
    """While this file is there, attempts of `owed_recovering` begin that do not end."""
    return Path(os.environ[STARTS]).with_suffix(".hang")


@shared_task(base=OutboxTask, name="bench.owed_recovering", ignore_result=True)
def owed_recovering() -> None:
    hangs = hang().exists()
    _started(1)
    while hangs:
        time.sleep(0.01)

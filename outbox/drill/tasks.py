"""Tasks of the drill's own, for what a subject's task cannot be made to do."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from celery import shared_task

from outbox.drill import ledgers, own_effects
from outbox.drill.environment import FOLDER
from outbox.tasks import OutboxTask

DEADLINE = 4  # seconds
FAILS_EVERY = 1.5  # seconds: the third failure's next start would be past the deadline
TIME_LIMIT = 2  # seconds
RATE = "1/h"
LINGERING = "lingering"  # the file's name


@shared_task(base=OutboxTask, bind=True, ignore_result=True)
def touch(self: Any) -> None:
    """Have an effect, committed before the job's end is."""
    own_effects.take(self.request.id)


@shared_task(base=OutboxTask, bind=True, ignore_result=True, atomic=True)
def touch_atomically(self: Any) -> None:
    """Have an effect, committed with the job's end."""
    own_effects.take(self.request.id)


@shared_task(base=OutboxTask, bind=True, ignore_result=True, rate_limit=RATE)
def trickle(self: Any) -> None:
    """As `touch`, but a worker runs the first only, and keeps the others for later."""
    own_effects.take(self.request.id)


@shared_task(base=OutboxTask, bind=True, ignore_result=True)
def linger(self: Any) -> None:
    """Stay in the body for as long as the file is there, and have an effect then."""
    _linger(self.request.id)


@shared_task(base=OutboxTask, bind=True, ignore_result=True, max_crashes=1)
def linger_once(self: Any) -> None:
    """The same, and given up at its first crash."""
    _linger(self.request.id)


@shared_task(base=OutboxTask)
def leave(how: str) -> None:
    """Leave by what would end a process."""
    raise {"exit": SystemExit, "memory": MemoryError}[how](f"left by {how}")


@shared_task(base=OutboxTask, time_limit=TIME_LIMIT, max_retries=0)
def overrun() -> None:
    """Run until the hard time limit."""
    while True:
        time.sleep(0.05)


class NeverWorks(Exception):
    """What `keep_failing` raises."""


@shared_task(
    base=OutboxTask,
    autoretry_for=(NeverWorks,),
    default_retry_delay=FAILS_EVERY,
    max_retries=None,
    retry_deadline=DEADLINE,
)
def keep_failing() -> None:
    """Fail, again and again, until the retry deadline."""
    raise NeverWorks("this attempt failed too")


def _linger(job_id: str) -> None:
    while (Path(os.environ[FOLDER]) / LINGERING).exists():
        time.sleep(0.05)
    own_effects.take(job_id)


_ALL = (
    touch,
    touch_atomically,
    trickle,
    linger,
    linger_once,
    leave,
    overrun,
    keep_failing,
    *ledgers.ALL,
)
OWN = tuple(task.name for task in _ALL)

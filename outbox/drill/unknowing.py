"""A worker of an older release: it is made to forget a task before it takes its first delivery."""

from __future__ import annotations

import os
from typing import Any

from celery.signals import celeryd_after_setup

from outbox.drill.environment import UNKNOWN


def listen() -> None:
    """Do so where the environment names a task."""
    if os.environ.get(UNKNOWN):
        celeryd_after_setup.connect(_forget, weak=False)


def _forget(*, instance: Any, **_: Any) -> None:
    del instance.app.tasks[os.environ[UNKNOWN]]

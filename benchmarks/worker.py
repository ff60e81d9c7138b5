"""The measured Celery app, `celery -A benchmarks.worker worker`, and its one worker process."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from celery import Celery

from outbox.drill.processes import Process

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.settings")

NODE = "bench@localhost"
QUEUE = "bench"

app = Celery("benchmarks")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


@contextlib.contextmanager
def running(folder: Path, node: str = NODE) -> Iterator[Process]:
    """A prefork worker with two children that runs both sides of a comparison."""
    argv = [sys.executable, "-m", "celery", "-A", "benchmarks.worker", "worker"]
    argv += ["-c", "2", "-Q", QUEUE, "-n", node, "-l", "WARNING"]
    with Process("worker", argv=argv, log=folder / f"{node.partition('@')[0]}.log") as worker:
        await_ready(worker, node)
        yield worker


def await_ready(worker: Process, node: str) -> None:
    """Wait until it answers a ping."""
    worker.wait_for(
        lambda: app.control.ping([node], timeout=0.5), timeout=60, what="it answered a ping"
    )

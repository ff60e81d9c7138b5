"""Database connections of a worker are kept between jobs, as Django keeps them between requests.

Celery's fixup closes every connection before and after each task, whatever CONN_MAX_AGE says
(`celery/fixups/django.py`, 5.7). With a claim before `task_prerun` that is two new connections a
job, which cost many times the job itself.
"""

from __future__ import annotations

from typing import Any

from celery import current_task
from celery.fixups.django import DjangoWorkerFixup
from django.db import close_old_connections

from outbox.lifecycle import run


def keep() -> None:
    """Close what Django would close after a request: what is broken, or past its CONN_MAX_AGE."""
    DjangoWorkerFixup.close_database = _close_old


def _close_old(fixup: DjangoWorkerFixup, **_: Any) -> None:
    current = getattr(current_task.request, run.REQUEST_KEY, None) if current_task else None
    # Not between a claim and its ending: the claim has just used the connection.
    if current is None or current.ended:
        close_old_connections()

"""What holds for every point of a drill: claim, limits, owner, servers; read from the task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import redis
from celery import Celery
from django.conf import settings as django_settings
from django.db import connection

from outbox.conf import settings
from outbox.drill.environment import TIMES
from outbox.drill.errors import DrillError
from outbox.drill.subject import Subject
from outbox.embedded import Servers
from outbox.lifecycle.enqueue import durable_task
from outbox.tasks import OutboxTask


@dataclass(frozen=True, kw_only=True)
class About:
    """The answers of the drill's form that are the same at every point; each a sentence."""

    obligation: str
    claim: str
    expiry: str
    retry_limit: str
    backoff: str
    failure_owner: str
    deduplication: str
    versions: Mapping[str, str]


def durable(subject: Subject, *, app: Celery) -> OutboxTask:
    """The subject's task.

    Raises:
        DrillError: it is none, or not durable.
    """
    task = durable_task(app, subject.task)
    if task is None:
        raise DrillError(f"{subject.task} is no durable task of this project: see Subject.task.")
    return task


def retries(task: OutboxTask, *, settings: Mapping[str, Any]) -> int:
    """The task's max_retries during the drill.

    Raises:
        DrillError: it has no limit, so that it would never be reached.
    """
    annotations = settings.get("CELERY_TASK_ANNOTATIONS") or {}
    found = annotations.get(task.name, {}).get("max_retries", task.max_retries)
    if found is None:
        raise DrillError(
            f"{task.name} has no max_retries: set one in the subject's settings, "
            "CELERY_TASK_ANNOTATIONS."
        )
    return int(found)


def describe(task: OutboxTask, *, subject: Subject, own: Servers) -> About:
    """Read it from the task, the settings and the servers."""
    drilled = retries(task, settings=subject.settings)
    return About(
        obligation=(
            f"{task.name}, committed in the {subject.business}'s own transaction; one ID for life"
        ),
        claim="one conditional UPDATE of the row; every later write needs its random token",
        expiry=f"a lease of {TIMES['LEASE']:g} s here, {settings().LEASE:g} s as configured",
        retry_limit=(
            f"{drilled + 1} attempts here, {_attempts(task)} as configured; "
            f"crashes apart, at most {task.max_crashes or settings().MAX_CRASHES}"
        ),
        backoff=f"{_backoff(task)}; after a crash {_crash_backoff()}",
        failure_owner=_owner(task),
        deduplication=subject.deduplication,
        versions=_versions(own),
    )


def _attempts(task: OutboxTask) -> str:
    return "any number of" if task.max_retries is None else str(task.max_retries + 1)


def _backoff(task: OutboxTask) -> str:
    first = float(getattr(task, "retry_backoff", 0))
    if not first:
        return f"{task.default_retry_delay:g} s after a failure"
    most = getattr(task, "retry_backoff_max", 600)
    jitter = ", jittered" if getattr(task, "retry_jitter", True) else ""
    return f"after a failure {first:g} s, doubling to {most:g} s{jitter}"


def _crash_backoff() -> str:
    return f"{TIMES['CRASH_BACKOFF']:g} s, doubling to 600 s, jittered"


def _owner(task: OutboxTask) -> str:
    owner = task.owner or settings().DEFAULT_OWNER
    addresses = ", ".join(settings().OWNERS.get(owner, ()))
    return f"{owner or 'nobody'} ({addresses or 'no address'} as configured, the drill's own here)"


def _versions(own: Servers) -> Mapping[str, str]:
    with redis.Redis.from_url(own.valkey.url) as client:
        found = client.info("server")
    connection.ensure_connection()
    number = connection.pg_version  # type: ignore[attr-defined]
    return {
        "PostgreSQL": f"{number // 10000}.{number % 10000}",
        "Valkey": str(found.get("valkey_version", found["redis_version"])),
        "Celery": version("celery"),
        "Django": version("Django"),
        "settings": django_settings.SETTINGS_MODULE,
    }

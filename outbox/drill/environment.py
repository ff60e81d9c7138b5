"""Where the drilled processes work, and turning this process's own database connections there."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.conf import settings as django_settings
from django.db import connections, router
from psycopg.conninfo import conninfo_to_dict

from outbox.drill.errors import DrillError
from outbox.failpoints import VARIABLE as FAILPOINTS

SETTINGS = "outbox.drill.settings"
PROJECT = "OUTBOX_DRILL_PROJECT"  # the project's own settings module
DATABASE = "OUTBOX_DRILL_DATABASE"  # the URL of the drill's PostgreSQL
FOLDER = "OUTBOX_DRILL_FOLDER"
OVERRIDES = "OUTBOX_DRILL_OVERRIDES"  # the subject's settings, as JSON
JOURNAL = "OUTBOX_DRILL_JOURNAL"  # file that the witness writes to
QUEUES = "OUTBOX_DRILL_QUEUES"  # what this worker consumes instead of the default queue
UNKNOWN = "OUTBOX_DRILL_UNKNOWN"  # a task whose code this worker is to be without

#: Short times, so that a drill takes seconds. Nothing that reaches outside it: see `settings`.
TIMES: Mapping[str, float] = {
    "LEASE": 3,
    "DISPATCH_EVERY": 0.5,
    "RECONCILE_EVERY": 1,
    "STRAND_GRACE": 2,
    "CRASH_BACKOFF": 1,
    "BREAKER": 0.5,
    "TELL_EVERY": 3,
}


def variables(
    *, database: str, broker: str, folder: Path, overrides: Mapping[str, Any]
) -> dict[str, str]:
    """The environment of every drilled process; no configured server is left in it."""
    return {
        "DJANGO_SETTINGS_MODULE": SETTINGS,
        PROJECT: project_settings(),
        FOLDER: str(folder),
        JOURNAL: str(folder / "journal"),
        OVERRIDES: json.dumps(dict(overrides)),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        FAILPOINTS: "",
        **database_variables(database),
        **broker_variables(broker),
    }


def broker_variables(url: str) -> dict[str, str]:
    """Celery lets these three overrule its settings: each must name the drill's own broker."""
    names = ("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL")
    return dict.fromkeys(names, url)


@contextmanager
def at_broker(url: str) -> Iterator[None]:
    """Let this process's Celery app mean the broker at `url`, whatever its settings say."""
    variables = broker_variables(url)
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def database_variables(url: str) -> dict[str, str]:
    """The drilled processes' database, under both names that they may know it by."""
    return {DATABASE: url, "DATABASE_URL": url}


def project_settings() -> str:
    """The name of the settings module that this process runs with.

    Raises:
        DrillError: there is none to hand to other processes.
    """
    module: str | None = getattr(django_settings, "SETTINGS_MODULE", None)
    if not module:
        raise DrillError("The drill's processes need a settings module: set DJANGO_SETTINGS_MODULE")
    return module


def database_settings(url: str) -> dict[str, Any]:
    """Django's settings for a database at a PostgreSQL URL."""
    found = conninfo_to_dict(url)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": found["dbname"],
        "USER": found["user"],
        "PASSWORD": found["password"],
        "HOST": found["host"],
        "PORT": found["port"],
        "CONN_MAX_AGE": 600,
        "CONN_HEALTH_CHECKS": True,
    }


@contextmanager
def at_database(url: str) -> Iterator[None]:
    """Let every alias of this process mean the database at `url`, whatever a router says.

    All of them, so that no query of the drill can reach a configured database.
    """
    before, routers = connections.settings, router.routers
    open_before = {alias: connections[alias] for alias in before}
    connections.settings = connections.configure_settings(
        {alias: database_settings(url) for alias in before}
    )
    router.routers = []
    _forget(open_before)
    try:
        yield
    finally:
        connections.close_all()
        connections.settings, router.routers = before, routers
        for alias, connection in open_before.items():
            connections[alias] = connection


def _forget(aliases: Mapping[str, Any]) -> None:
    for alias in aliases:
        del connections[alias]

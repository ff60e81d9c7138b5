"""Starts PostgreSQL and Valkey for the test run, before pytest-django loads the settings.

Where DATABASE_URL and CELERY_BROKER_URL are set already, the tests use those servers instead: the
broker's database is emptied between tests.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox.embedded import EmbeddedError, Servers, servers

FOLDER = Path(__file__).resolve().parent.parent / ".run" / "test"
VARIABLES = ("DATABASE_URL", "CELERY_BROKER_URL")
RUNNING = pytest.StashKey[Servers]()
STOP = pytest.StashKey[contextlib.ExitStack]()


# A wrapper, since those run before the hook of pytest-django that reads the settings.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Iterator[None]:
    if _needed(early_config):
        _start(early_config)
    try:
        return (yield)
    except BaseException:
        # Settings that cannot be loaded: pytest_unconfigure is not called then.
        pytest_unconfigure(early_config)
        raise


def pytest_unconfigure(config: pytest.Config) -> None:
    if STOP in config.stash:
        config.stash[STOP].close()


def _needed(config: pytest.Config) -> bool:
    options = config.known_args_namespace
    shows_only = options.help or options.version or getattr(options, "collectonly", False)
    given = [name for name in VARIABLES if os.environ.get(name)]
    if len(given) == 1:
        raise pytest.UsageError(f"Set both of {' and '.join(VARIABLES)}, or neither.")
    return not shows_only and not given


def _start(config: pytest.Config) -> None:
    stop = config.stash[STOP] = contextlib.ExitStack()
    try:
        running = stop.enter_context(servers(FOLDER))
    except EmbeddedError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[RUNNING] = running
    os.environ.update(running.environment)

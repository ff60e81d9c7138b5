"""Starts PostgreSQL and Valkey for the test run, before pytest-django loads the settings.

Where DATABASE_URL and CELERY_BROKER_URL are set already, the tests use those servers instead: the
broker's database is emptied between tests.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from outbox.embedded import EmbeddedError, Servers, servers

FOLDER = Path(__file__).resolve().parent.parent / ".run" / "test"
VARIABLES = ("DATABASE_URL", "CELERY_BROKER_URL")
ANSWER_SECONDS = 3
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
    if given and not shows_only:
        _ask_given()
    return not shows_only and not given


def _ask_given() -> None:
    """Say once that a server is away, instead of in each test."""
    for name, ask in zip(VARIABLES, (_ask_database, _ask_broker), strict=True):
        try:
            ask(os.environ[name])
        except (psycopg.Error, redis.RedisError, ValueError) as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            raise pytest.UsageError(
                f"The server that {name} names cannot be reached: {reason}. Start it, or unset "
                f"both of {' and '.join(VARIABLES)}: then the tests start servers of their own."
            ) from error


def _ask_database(url: str) -> None:
    # Django makes the test database from this one: the named one need not exist.
    psycopg.connect(url, dbname="postgres", connect_timeout=ANSWER_SECONDS).close()


def _ask_broker(url: str) -> None:
    once = Retry(NoBackoff(), 0)
    with redis.Redis.from_url(
        url, socket_timeout=ANSWER_SECONDS, socket_connect_timeout=ANSWER_SECONDS, retry=once
    ) as client:
        client.ping()


def _start(config: pytest.Config) -> None:
    stop = config.stash[STOP] = contextlib.ExitStack()
    try:
        running = stop.enter_context(servers(FOLDER))
    except EmbeddedError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[RUNNING] = running
    os.environ.update(running.environment)

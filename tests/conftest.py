"""Fixtures that every test may use."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from django.conf import settings as django_settings
from django.db import connection
from psycopg.conninfo import make_conninfo

from outbox.brokers import sender
from outbox.drill.processes import Process
from outbox.embedded import Servers
from outbox.lifecycle import publish
from tests.servers import RUNNING
from tests.waiting import wait_until


@pytest.fixture(scope="session")
def servers(pytestconfig: pytest.Config) -> Servers:
    """The run's own servers, for tests that stop, kill and restart them."""
    if RUNNING not in pytestconfig.stash:
        refuse = pytest.fail if os.environ.get("CI") else pytest.skip
        refuse("DATABASE_URL names servers that are not ours to stop")
    return pytestconfig.stash[RUNNING]


@pytest.fixture
def valkey() -> Iterator[redis.Redis]:
    """A client of the broker, whose database is empty before and after."""
    with redis.Redis.from_url(os.environ["CELERY_BROKER_URL"]) as client:
        client.flushdb()
        yield client
        client.flushdb()


@pytest.fixture
def second(transactional_db: None) -> Iterator[psycopg.Connection]:
    """Another connection to the tests' database, to force the order of a race."""
    given = connection.get_connection_params()
    names = ("dbname", "user", "password", "host", "port")
    address = make_conninfo(**{name: given[name] for name in names})
    with psycopg.connect(address, autocommit=True) as other:
        yield other


@pytest.fixture(autouse=True)
def _forget() -> None:
    """One test's broken broker or paused queue must not keep the next one's messages back."""
    sender.close_breaker()
    sender.forget_refusals()
    publish.forget_paused_queues()


@pytest.fixture(scope="session")
def surroundings(django_db_setup: None) -> dict[str, str]:
    """The environment of processes that work on the tests' own database and broker."""
    given = connection.settings_dict
    host = f"{given['USER']}:{given['PASSWORD']}@{given['HOST']}:{given['PORT']}"
    return {
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "DATABASE_URL": f"postgresql://{host}/{given['NAME']}",
        "CELERY_BROKER_URL": django_settings.CELERY_BROKER_URL,
    }


def _worker(
    *arguments: str, name: str, log: Path, env: dict[str, str], app: str = "tests.worker"
) -> Process:
    argv = [sys.executable, "-m", "celery", "-A", app, "worker", "--loglevel=INFO"]
    quiet = ["-n", f"{name}@%h", "--without-mingle", "--without-gossip", "-c", "2"]
    return Process(name, argv=[*argv, *quiet, *arguments], log=log / f"{name}.log", env=env)


def _ready(worker: Process) -> bool:
    return " ready." in worker.tail(50)


@pytest.fixture(scope="module")
def _running_worker(
    surroundings: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("worker")
    with _worker(name="shared", log=folder, env=surroundings) as worker:
        worker.wait_for(lambda: _ready(worker), timeout=30, what="ready")
        yield worker


@pytest.fixture
def worker(
    transactional_db: None, valkey: redis.Redis, _running_worker: Process
) -> Iterator[Process]:
    """A real prefork worker that the tests of a module share: none may kill it, or start others."""
    yield _running_worker
    # What it still does, such as telling an owner, would meet the flush of the tables.
    wait_until(lambda: not valkey.llen("celery") and not valkey.hlen("unacked"), timeout=30)


StartWorker = Callable[..., Process]


@pytest.fixture
def start_worker(
    transactional_db: None, valkey: redis.Redis, surroundings: dict[str, str], tmp_path: Path
) -> Iterator[StartWorker]:
    """Start real workers of the test's own, to be killed; they are stopped at the end."""
    with ExitStack() as stack:

        def start(
            *arguments: str, name: str = "worker", app: str = "tests.worker", **env: Any
        ) -> Process:
            around = {**surroundings, **env}
            process = _worker(*arguments, name=name, log=tmp_path, env=around, app=app)
            stack.enter_context(process)
            process.wait_for(lambda: _ready(process), timeout=30, what="ready")
            return process

        yield start

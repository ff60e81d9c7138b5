"""Connections to the database that neither answer nor break, as behind a firewall that forgot them.

New ones work. The wire is a real one, and what its silence leaves on the server's side is real too.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from celery.result import AsyncResult
from django.db import OperationalError, connection, connections

from outbox import outage, silence
from outbox.drill.processes import Process
from outbox.drill.proxy import Proxy
from outbox.lifecycle import lease
from outbox.models import OutboxEntry, OutboxWorker
from outbox.silence import Patience
from outbox.states import State
from tests import tasks
from tests.following import entry_of, stored
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]
POOLS = ["prefork", "threads", "gevent"]
LEASE = 6


@pytest.fixture
def wire(transactional_db: None) -> Iterator[Proxy]:
    """It ends before the tables are flushed, and with it what the server still holds for it."""
    given = connection.settings_dict
    proxy = Proxy(given["HOST"], int(given["PORT"]))
    with proxy.running():
        yield proxy


@pytest.fixture
def start_behind(start_worker: Start, surroundings: dict[str, str], wire: Proxy) -> Start:
    """Start a worker whose connections to the database go over the wire."""
    port = f":{connection.settings_dict['PORT']}/"
    url = surroundings["DATABASE_URL"].replace(port, f":{wire.port}/")

    def start(*arguments: str, **env: str) -> Process:
        return start_worker(*arguments, DATABASE_URL=url, TESTS_LEASE=str(LEASE), **env)

    return start


@pytest.fixture
def until(tmp_path: Path) -> Path:
    return tmp_path / "until"


def begun(until: Path) -> AsyncResult:
    """A job that runs until that file is there, and whose lease has been renewed once."""
    notes = until.with_name("notes")
    result = tasks.slow.apply_async((str(notes), str(until)), using="default")
    wait_until(lambda: notes.exists() and renewals(result) >= 1, timeout=30)
    return result


def renewals(result: AsyncResult) -> int:
    """A claim is version 2; each renewal adds one."""
    return OutboxEntry.objects.get(pk=result.id).version - 2


def swept_while_renewed(result: AsyncResult, times: int) -> None:
    """Others, whose database is well, sweep all the while."""
    seen = renewals(result)

    def look() -> bool:
        lease.sweep(using="default")
        assert entry_of(result).crashes == 0
        return renewals(result) >= seen + times

    wait_until(look, timeout=60)


def counted(result: AsyncResult) -> tuple[str, int, int, int]:
    wait_until(lambda: entry_of(result).is_final, timeout=60)
    entry = entry_of(result)
    return entry.status, entry.attempts, entry.crashes, entry.failures


@pytest.mark.parametrize("pool", POOLS)
def test_a_job_keeps_its_lease_though_its_workers_connections_fall_silent(
    start_behind: Start, wire: Proxy, until: Path, pool: str
) -> None:
    worker = start_behind(f"--pool={pool}")
    result = begun(until)
    wire.silence()
    before = OutboxWorker.objects.get().heartbeat_at
    swept_while_renewed(result, times=3)  # a lease is three renewals long
    assert OutboxWorker.objects.get().heartbeat_at > before
    until.touch()
    assert counted(result) == (State.SUCCEEDED, 1, 0, 0)
    worker.signal(signal.SIGTERM)
    assert worker.wait(60) == 0


@pytest.mark.parametrize("pool", POOLS)
def test_a_warm_shutdown_ends_though_the_connections_are_silent(
    start_behind: Start, wire: Proxy, until: Path, pool: str
) -> None:
    worker = start_behind(f"--pool={pool}")
    result = begun(until)
    wire.silence()
    worker.signal(signal.SIGTERM)
    wait_until(lambda: "Warm shutdown" in worker.tail(100))
    until.touch()
    assert worker.wait(60) == 0
    assert counted(result) == (State.SUCCEEDED, 1, 0, 0)
    assert OutboxWorker.objects.get().stopped_at is not None


def test_a_child_that_dies_in_the_silence_is_a_crash_and_its_job_runs_again(
    start_behind: Start, wire: Proxy, until: Path
) -> None:
    start_behind()
    result = begun(until)
    pid = entry_of(result).lease_pid
    assert pid is not None
    wire.silence()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: entry_of(result).crashes == 1, timeout=30)
    assert entry_of(result).events.get(verb="crash").actor == "clerk"


def test_a_claim_is_made_over_a_new_connection(start_behind: Start, wire: Proxy) -> None:
    start_behind("-c", "1")
    first = tasks.add.delay(1, 2)
    stored(first, "SUCCESS")  # Celery's own write has no bound
    wire.silence()
    assert counted(tasks.add.delay(3, 4)) == (State.SUCCEEDED, 1, 0, 0)


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_a_silent_database_costs_no_other_its_leases(
    start_behind: Start, wire: Proxy, settings: Any, until: Path
) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "DATABASES": ["other", "default"]}
    start_behind(TESTS_DATABASES="other,default")
    result = begun(until)
    wire.silence(connections["other"].settings_dict["NAME"])
    swept_while_renewed(result, times=4)
    until.touch()
    assert counted(result) == (State.SUCCEEDED, 1, 0, 0)


def test_a_server_that_is_only_slow_gets_to_answer_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outage, "PATIENCE", 0.1)  # leases of 2 seconds
    sessions = []

    def work() -> None:
        with connection.cursor() as cursor:
            sessions.append(connection.connection)
            cursor.execute("SELECT pg_sleep(1)")

    outage.until_answered(work, using="default", what="testing")
    assert len(sessions) == 4  # after 0.2, 0.4 and 0.8 seconds in vain
    assert [session.closed for session in sessions] == [True, True, True, False]
    assert "wait" not in vars(sessions[-1])


def test_a_statement_whose_answer_keeps_coming_is_not_given_up() -> None:
    rows = "SELECT pg_sleep(0.15), repeat('x', 20000) FROM generate_series(1, 8)"
    patience = Patience(0.5)
    with silence.bounded(connection, patience), connection.cursor() as cursor:
        cursor.execute(rows)
        assert len(cursor.fetchall()) == 8
    assert patience.seconds == 0.5


def test_a_transaction_whose_statement_is_not_answered_is_left_at_once(wire: Proxy) -> None:
    other = connection.copy()
    other.settings_dict["PORT"] = wire.port
    with silence.bounded(other, Patience(0.3)), other.cursor() as cursor:
        other.set_autocommit(False)
        wire.silence()
        with pytest.raises(OperationalError, match=r"no answer for 0\.3 s"):
            cursor.execute("SELECT 1")
    with pytest.raises(psycopg.OperationalError, match="closed"):
        other.connection.rollback()
    other.connection = None


def test_a_connect_that_nobody_answers_is_bounded_whatever_the_project_says() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, ThreadPoolExecutor(1) as thread:
        options = {"pool": {"timeout": 600}, "connect_timeout": 3600}
        port = mute.getsockname()[1]
        with pytest.raises(OperationalError, match="timeout"):
            thread.submit(_connect, port, options).result()


def _connect(port: int, options: dict[str, Any]) -> None:
    """In a thread of its own, whose connections are nobody else's."""
    assert threading.current_thread() is not threading.main_thread()
    mine = connections["default"]
    mine.settings_dict = {**mine.settings_dict, "PORT": port, "OPTIONS": options}
    silence.bound_all(lambda: Patience(1))
    mine.ensure_connection()

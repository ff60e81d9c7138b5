"""A worker that stops finishes or gives back what it holds, and burns nothing."""

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import redis
from django.db import connection

from outbox import maintenance
from outbox.drill.processes import Process
from outbox.models import OutboxEntry, OutboxWorker
from outbox.states import State
from tests import tasks
from tests.following import APP, entry_of
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]
POOLS = ["prefork", "threads", "solo", "gevent"]


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return tmp_path / "notes"


@pytest.fixture
def until(tmp_path: Path) -> Path:
    return tmp_path / "until"


def begun(notes: Path, times: int = 1) -> None:
    wait_until(lambda: notes.exists() and notes.read_text().count("start") >= times, timeout=30)


def all_succeeded(results: list) -> None:
    def look() -> bool:
        maintenance.dispatch(APP, using="default")
        return all(entry_of(result).status == State.SUCCEEDED for result in results)

    wait_until(look, timeout=60)


def counted(results: list) -> set[tuple[int, int, int, int]]:
    """Attempts, failures, crashes, releases of each."""
    return {
        (entry.attempts, entry.failures, entry.crashes, entry.releases)
        for entry in map(entry_of, results)
    }


@pytest.mark.parametrize("pool", POOLS)
def test_a_warm_shutdown_finishes_what_runs_and_gives_back_what_waits(
    start_worker: Start, valkey: redis.Redis, notes: Path, until: Path, pool: str
) -> None:
    """As in a rolling deploy: the new worker is there, the old one is told to stop."""
    old = start_worker(f"--pool={pool}")
    results = [tasks.slow.delay(str(notes), str(until)) for _ in range(6)]
    begun(notes, 1 if pool == "solo" else 2)
    start_worker(f"--pool={pool}", name="new")
    old.signal(signal.SIGTERM)
    wait_until(lambda: "Warm shutdown" in old.tail(100))
    until.touch()
    assert old.wait(60) == 0
    all_succeeded(results)
    assert counted(results) == {(1, 0, 0, 0)}
    assert notes.read_text().count("start") == 6


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_a_cold_shutdown_gives_back_what_it_ends(
    start_worker: Start, notes: Path, until: Path, pool: str
) -> None:
    old = start_worker(f"--pool={pool}")
    results = [tasks.slow.delay(str(notes), str(until)) for _ in range(2)]
    begun(notes, 2)
    old.signal(signal.SIGQUIT)
    old.wait(60)
    assert {entry_of(result).status for result in results} <= {State.PENDING, State.PUBLISHED}
    until.touch()
    start_worker(f"--pool={pool}", name="new")
    all_succeeded(results)
    assert counted(results) == {(2, 0, 0, 1)}


def test_a_cold_shutdown_gives_back_what_is_in_the_middle_of_a_query(
    start_worker: Start, notes: Path
) -> None:
    """Its greenlet is ended inside psycopg, which leaves the connection busy."""
    old = start_worker("--pool=gevent")
    results = [tasks.in_a_query.delay(str(notes)) for _ in range(2)]
    begun(notes, 2)
    old.signal(signal.SIGQUIT)
    old.wait(60)
    assert counted(results) == {(1, 0, 0, 1)}
    wait_until(nobody_sleeps)


def nobody_sleeps() -> bool:
    """End what goes on in the server after its client is gone."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE query = 'SELECT pg_sleep(60)'"
        )
        return not cursor.fetchone()[0]


def test_what_still_arrives_after_a_cold_shutdown_is_not_begun(
    start_worker: Start, notes: Path, until: Path
) -> None:
    """Gevent's loop sits in a read that brings one more message; nobody would end that run.

    Where the signal finds gevent in its hub, Celery 5.7 ends with an error before that read ends.
    """
    old = start_worker("--pool=gevent")
    tasks.slow.delay(str(notes), str(until))
    begun(notes)
    old.signal(signal.SIGQUIT)
    wait_until(lambda: "Cold shutdown" in old.tail(100) or not old.alive)
    late = tasks.slow.delay(str(notes), str(until))
    old.wait(60)
    assert counted([late]) == {(0, 0, 0, 0)}
    until.touch()
    start_worker("--pool=gevent", name="new")
    all_succeeded([late])


def test_a_cold_shutdown_ends_a_child_that_heeds_no_signal(
    start_worker: Start, notes: Path, until: Path
) -> None:
    old = start_worker()
    result = tasks.stubborn.delay(str(notes), str(until))
    begun(notes)
    old.signal(signal.SIGQUIT)
    old.wait(60)
    child = int(notes.read_text().split()[1])
    assert not psutil.pid_exists(child)
    assert counted([result]) == {(1, 0, 0, 1)}


@pytest.mark.parametrize("pool", ["threads", "solo"])
@pytest.mark.parametrize("times", [1, 3])
def test_what_a_cold_shutdown_cannot_end_keeps_its_lease_until_it_is_done(
    start_worker: Start, notes: Path, until: Path, pool: str, times: int
) -> None:
    """Told three times, Celery no longer waits for its pool; its threads go on all the same."""
    old = start_worker(f"--pool={pool}")
    result = tasks.slow.delay(str(notes), str(until))
    begun(notes)
    said = ["Hitting Ctrl+C again", "Waiting gracefully for cold shutdown", "Cold shutdown"]
    for words in said[:times]:
        old.signal(signal.SIGQUIT)
        if words != said[-1] and pool == "threads":
            old.wait_for(lambda words=words: words in old.tail(100), timeout=15, what=words)  # type: ignore[misc]
    start_worker(f"--pool={pool}", name="new")
    seen = entry_of(result).version
    wait_until(lambda: entry_of(result).version >= seen + 5, timeout=30)  # longer than its lease
    until.touch()
    old.wait(60)
    all_succeeded([result])
    assert counted([result]) == {(1, 0, 0, 0)}
    assert notes.read_text().count("start") == 1
    assert "NotImplementedError" not in old.tail(1000)


def test_a_soft_shutdown_lets_finish_what_can_and_gives_back_the_rest(
    start_worker: Start, notes: Path, tmp_path: Path, until: Path
) -> None:
    old = start_worker(TESTS_SOFT_SHUTDOWN="4")
    short, never = tmp_path / "short", tmp_path / "never"
    finishes = tasks.slow.delay(str(notes), str(short))
    stays = tasks.slow.delay(str(notes), str(never))
    begun(notes, 2)
    old.signal(signal.SIGQUIT)
    wait_until(lambda: "Initiating Soft Shutdown" in old.tail(100))
    short.touch()
    old.wait(60)
    assert (entry_of(finishes).status, counted([finishes])) == ("succeeded", {(1, 0, 0, 0)})
    assert counted([stays]) == {(1, 0, 0, 1)}


def test_a_worker_that_stopped_holds_nothing(start_worker: Start, notes: Path, until: Path) -> None:
    old = start_worker()
    for _ in range(6):
        tasks.slow.delay(str(notes), str(until))
    begun(notes, 2)
    wait_until(lambda: len(OutboxWorker.objects.get().holds) == 6)
    old.signal(signal.SIGTERM)
    until.touch()
    old.wait(60)
    row = OutboxWorker.objects.get()
    assert row.stopped_at is not None
    assert row.holds == []
    assert not OutboxEntry.objects.filter(status=State.RUNNING).exists()

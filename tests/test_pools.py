"""The same in every pool: what differs there is where the tracer runs and who acknowledges."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from django.db import connection, transaction
from django_celery_results.models import TaskResult

from outbox.drill.processes import Process
from outbox.embedded import Valkey
from outbox.lifecycle import publish
from outbox.states import State
from tests import tasks
from tests.factories import make_entry, reread
from tests.following import APP, ended, entry_of, hint_of, stored
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_committed_entry_runs_once_and_keeps_its_result(
    start_worker: Callable[..., Process], pool: str
) -> None:
    start_worker(f"--pool={pool}")
    with transaction.atomic():
        result = tasks.add.delay(2, 3)
        assert entry_of(result).status == State.PENDING
    entry = ended(result)
    assert (entry.status, entry.result, entry.attempts) == (State.SUCCEEDED, 5, 1)
    assert entry.events.count() == 0
    assert stored(result, "SUCCESS").result == "5"
    assert entry.claim_token is not None
    assert not entry.run_goes_on


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_discarded_delivery_is_acknowledged_and_the_worker_goes_on(
    start_worker: Callable[..., Process], valkey: redis.Redis, pool: str
) -> None:
    start_worker(f"--pool={pool}")
    done = make_entry(State.SUCCEEDED)
    publish.publish_committed(APP, [hint_of(done)], using="default")
    assert ended(tasks.add.delay(1, 1)).status == State.SUCCEEDED
    wait_until(lambda: not valkey.hlen("unacked"))
    assert reread(done).attempts == 1
    assert not TaskResult.objects.filter(task_id=str(done.pk)).exists()


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
@pytest.mark.parametrize("how", ["SystemExit", "MemoryError"])
def test_a_task_that_exits_is_recorded_and_the_worker_lives(
    start_worker: Callable[..., Process], valkey: redis.Redis, pool: str, how: str
) -> None:
    worker = start_worker(f"--pool={pool}")
    entry = ended(tasks.leaving.delay(how))
    assert (entry.status, entry.error) == (State.FAILED, f"{how}: {how}")
    assert ended(tasks.add.delay(1, 1)).status == State.SUCCEEDED
    wait_until(lambda: not valkey.hlen("unacked"))
    assert worker.alive


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_a_handler_that_exits_is_recorded_and_the_worker_lives_and_stops(
    start_worker: Callable[..., Process], valkey: redis.Redis, pool: str
) -> None:
    worker = start_worker(f"--pool={pool}")
    entry = ended(tasks.exiting.delay(where="before_start"))
    assert (entry.status, entry.error) == (State.FAILED, "SystemExit: enough")
    assert ended(tasks.exiting.delay(where="on_success")).status == State.SUCCEEDED
    assert ended(tasks.add.delay(1, 1)).status == State.SUCCEEDED
    wait_until(lambda: not valkey.hlen("unacked"))
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0


def test_a_warm_shutdown_lets_the_body_finish(
    start_worker: Callable[..., Process], tmp_path: Path
) -> None:
    worker = start_worker()
    path, until = tmp_path / "notes", tmp_path / "until"
    result = tasks.slow.delay(str(path), str(until))
    wait_until(path.exists)
    worker.signal(signal.SIGTERM)
    until.touch()
    assert worker.wait(30) == 0
    entry = entry_of(result)
    assert (entry.status, entry.attempts) == (State.SUCCEEDED, 1)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_worker_that_holds_messages_outlives_its_broker(
    start_worker: Callable[..., Process], tmp_path: Path, pool: str
) -> None:
    path, until, broker = tmp_path / "notes", tmp_path / "until", Valkey(tmp_path / "broker")
    broker.start()
    try:
        worker = start_worker(f"--pool={pool}", CELERY_BROKER_URL=broker.url)
        # Published by the worker itself: this process has another broker.
        args = [str(path), str(until)]
        entries = [make_entry(task=tasks.slow.name, args=args) for _ in range(3)]
        wait_until(lambda: path.exists() and worker.tail(200).count("received") == 3)
        broker.kill()
        worker.wait_for(lambda: "lost" in worker.tail(200), timeout=30, what="it knew")
        broker.start()
        until.touch()
        wait_until(lambda: all(reread(entry).is_final for entry in entries), timeout=60)
        assert {reread(entry).attempts for entry in entries} == {1}
        worker.signal(signal.SIGTERM)
        assert worker.wait(30) == 0
    finally:
        broker.kill()


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_workers_connection_is_kept_between_jobs(
    start_worker: Callable[..., Process], pool: str
) -> None:
    start_worker(f"--pool={pool}", "-c", "1")
    first, second = (ended(tasks.session.delay()).result for _ in range(2))
    assert first[0] == second[0]


def test_a_job_whose_connection_was_cut_is_claimed_on_a_new_one(
    start_worker: Callable[..., Process],
) -> None:
    start_worker("--pool=solo")
    first = ended(tasks.session.delay()).result[0]
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s)", [first])
    entry = ended(tasks.session.delay())
    assert (entry.status, entry.attempts) == (State.SUCCEEDED, 1)
    assert entry.result[0] != first


def test_behind_a_pooler_nothing_is_prepared(start_worker: Callable[..., Process]) -> None:
    worker = start_worker("--pool=solo", TESTS_POOLED="1")
    assert ended(tasks.session.delay()).result[1] == 0
    worker.stop()
    start_worker("--pool=solo", name="direct")
    assert ended(tasks.session.delay()).result[1] > 0


def test_a_whole_app_is_durable_by_its_task_class(start_worker: Callable[..., Process]) -> None:
    from tests.whole import double

    start_worker(app="tests.whole")
    entry = ended(double.delay(21))
    assert (entry.task, entry.result) == ("whole.double", 42)

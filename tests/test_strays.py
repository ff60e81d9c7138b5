"""Deliveries that cannot become a run: nothing is lost by them, nothing loops, no worker ends."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis
from django.db import connection
from django_celery_results.models import TaskResult

from outbox import maintenance
from outbox.drill.processes import Process
from outbox.embedded import Servers
from outbox.lifecycle import decline
from outbox.models import OutboxEntry, OutboxWorker
from outbox.states import State
from tests import tasks
from tests.factories import make_entry, reread
from tests.following import APP, entry_of
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]


def send(name: str, task_id: Any) -> None:
    """A message as any other code base could send it."""
    message = APP.amqp.as_task_v2(str(task_id), name)
    with APP.producer_or_acquire() as producer:
        APP.amqp.send_task_message(producer, name, message)


def refused(reason: str) -> int:
    return sum(worker.refused.get(reason, 0) for worker in OutboxWorker.objects.all())


def still_works(path: Path) -> None:
    """The worker takes the next job, and holds no message back."""
    result = tasks.noted.delay(str(path))
    wait_until(lambda: entry_of(result).status == State.SUCCEEDED, timeout=30)


def nothing_waits(valkey: redis.Redis) -> None:
    wait_until(lambda: not valkey.llen("celery") and not valkey.hlen("unacked"), timeout=30)


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_a_worker_that_does_not_know_a_task_gives_it_back_for_one_that_does(
    start_worker: Start, valkey: redis.Redis, tmp_path: Path, pool: str
) -> None:
    old = start_worker(f"--pool={pool}", TESTS_UNKNOWN="tests.tasks.noted")
    ran = tmp_path / "ran"
    result = tasks.noted.delay(str(ran))
    wait_until(lambda: entry_of(result).events.filter(verb="decline").exists(), timeout=30)
    entry = entry_of(result)
    assert (entry.attempts, entry.failures, entry.crashes, entry.releases) == (0, 0, 0, 0)
    wait_until(lambda: refused("unknown task") >= 1)
    old.stop()
    start_worker(name="new")

    def has_run() -> bool:
        maintenance.dispatch(APP, using="default")
        return entry_of(result).status == State.SUCCEEDED

    wait_until(has_run, timeout=60)
    assert entry_of(result).attempts == 1
    assert ran.read_text() == f"{result.id} 0 ran\n"
    assert not TaskResult.objects.filter(task_id=result.id, status="FAILURE").exists()


def test_it_is_given_back_later_each_time(valkey: redis.Redis) -> None:
    entry = make_entry(State.PUBLISHED)
    longest = 0.0
    for _ in range(12):
        OutboxEntry.objects.filter(pk=entry.pk).update(status="published")
        answer = decline.decline(entry.pk, reason="unknown task", using="default")
        assert answer is decline.Answer.DECLINED
        after = reread(entry)
        last = after.events.filter(verb="decline").last()
        assert last is not None
        longest = max(longest, (after.available_at - last.at).total_seconds())
    assert 60 < longest <= 600


def test_a_delivery_before_its_publisher_has_marked_it_is_looked_at_again() -> None:
    entry = make_entry(State.PENDING)
    answer = decline.decline(entry.pk, reason="unknown task", using="default")
    assert answer is decline.Answer.NOT_MARKED
    assert reread(entry).version == entry.version


@pytest.mark.parametrize(
    "state", [State.RUNNING, State.SUCCEEDED, State.CANCELLED, State.UNCERTAIN]
)
def test_an_old_copy_moves_nothing(state: State) -> None:
    entry = make_entry(state)
    answer = decline.decline(entry.pk, reason="unknown task", using="default")
    assert answer is decline.Answer.STALE
    assert reread(entry).version == entry.version


def test_what_was_never_ours_is_told_to_celery_as_ever(
    start_worker: Start, valkey: redis.Redis, tmp_path: Path
) -> None:
    start_worker()
    task_id = str(uuid4())
    send("nowhere.task", task_id)
    wait_until(lambda: TaskResult.objects.filter(task_id=task_id, status="FAILURE").exists())
    nothing_waits(valkey)
    still_works(tmp_path / "next")


def test_an_unknown_task_waits_while_the_database_is_away(
    start_worker: Start, servers: Servers, valkey: redis.Redis
) -> None:
    entry = make_entry(State.PUBLISHED)
    start_worker(TESTS_UNKNOWN="tests.tasks.add")
    connection.close()
    servers.postgres.kill()
    try:
        send("tests.tasks.add", str(entry.pk))
        wait_until(lambda: valkey.hlen("unacked") == 1)
    finally:
        servers.postgres.start()
    wait_until(lambda: reread(entry).events.filter(verb="decline").exists(), timeout=30)
    assert reread(entry).status in (State.PENDING, State.PUBLISHED)


# What is no message


def message(**changes: Any) -> dict[str, Any]:
    """What kombu writes, with something in it that is not as it should be."""
    properties = {
        "correlation_id": str(uuid4()),
        "delivery_mode": 2,
        "delivery_info": {"exchange": "", "routing_key": "celery"},
        "priority": 0,
        "body_encoding": "utf-8",
        "delivery_tag": str(uuid4()),
    }
    found = {
        "body": '[[], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]',
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"id": str(uuid4()), "task": "tests.tasks.add", "lang": "py"},
        "properties": properties,
    }
    return found | changes


ITEMS: dict[str, bytes | str] = {
    "garbage": b"\x00\xff garbage",
    "empty": b"",
    "a number": b"17",
    "a list": b"[]",
    "an empty object": b"{}",
    "no properties": json.dumps(message(properties={})),
    "no headers": json.dumps(message(headers={})),
    "headers are a list": json.dumps(message(headers=[])),
    "headers are null": json.dumps(message(headers=None)),
    "no id": json.dumps(message(headers={"task": "tests.tasks.add"})),
    "a body that is no JSON": json.dumps(message(body="{")),
    "a body that is a number": json.dumps(message(body="17")),
    "a body of two": json.dumps(message(body="[[], {}]")),
    "a body that is null": json.dumps(message(body=None)),
    "a pickle": json.dumps(message(**{"content-type": "application/x-python-serialize"})),
    "an unknown encoding": json.dumps(message(**{"content-encoding": "klingon"})),
    "deep": b"[" * 200_000,
    "a deep body": json.dumps(message(body="[" * 5_000 + "]" * 5_000)),
    **{
        f"time limits {limits!r} of {task}": json.dumps(
            message(
                headers={"id": str(uuid4()), "task": f"tests.tasks.{task}", "timelimit": limits}
            )
        )
        for limits in ("soon", 5, ["x", None], [None, -1], [1, 2, 3])
        for task in ("plain", "add")
    },
    "an unknown task without id": json.dumps(message(headers={"task": "nowhere"})),
    "a task that is a list": json.dumps(message(headers={"id": "1", "task": []})),
    "an id that is a list": json.dumps(message(headers={"id": [], "task": "tests.tasks.add"})),
    "a huge body": json.dumps(message(body='["' + 20_000_000 * "x" + '"]')),
    "another encoding of the body": json.dumps(
        message(properties={"body_encoding": "base64", "delivery_tag": "1"}, body="%%%")
    ),
}


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_what_is_no_message_is_counted_and_stops_nobody(
    start_worker: Start, valkey: redis.Redis, tmp_path: Path, pool: str
) -> None:
    worker = start_worker(f"--pool={pool}")
    for name, item in ITEMS.items():
        valkey.lpush("celery", item)
        assert worker.alive, name
    still_works(tmp_path / "next")
    nothing_waits(valkey)
    assert worker.alive
    for _ in range(8):  # as many as there are slots in the pool, and more: none was lost
        still_works(tmp_path / "again")
    wait_until(lambda: refused("unreadable") >= len(ITEMS) - 3)
    assert "Unrecoverable error" not in worker.tail(5000)


def test_a_message_that_cannot_be_read_and_bears_an_entrys_id_costs_it_nothing(
    start_worker: Start, valkey: redis.Redis
) -> None:
    """Its own message may have been spoilt on the way: it is owed again."""
    entry = make_entry(State.PUBLISHED)
    start_worker()
    spoilt = message(body="{", headers={"id": str(entry.pk), "task": entry.task})
    valkey.lpush("celery", json.dumps(spoilt))

    def has_run() -> bool:
        maintenance.dispatch(APP, using="default")
        return reread(entry).status == State.SUCCEEDED

    wait_until(has_run, timeout=60)
    assert reread(entry).attempts == 1
    assert reread(entry).events.get().verb == "decline"


def test_a_forged_message_with_an_unknown_task_stores_nothing_about_the_entry(
    start_worker: Start, valkey: redis.Redis, tmp_path: Path
) -> None:
    entry = make_entry(State.SUCCEEDED)
    start_worker()
    send("nowhere.task", str(entry.pk))
    still_works(tmp_path / "next")
    nothing_waits(valkey)
    assert not TaskResult.objects.filter(task_id=str(entry.pk)).exists()
    assert reread(entry).version == entry.version


def test_discarded_deliveries_are_counted_by_reason(
    start_worker: Start, valkey: redis.Redis
) -> None:
    start_worker()
    ended, cancelled = make_entry(State.SUCCEEDED), make_entry(State.CANCELLED)
    for entry in (ended, cancelled, cancelled):
        send("tests.tasks.add", str(entry.pk))
    wait_until(lambda: refused("cancelled") == 2 and refused("finished") == 1)

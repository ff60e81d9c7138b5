"""Messages in the queues whose entry is not published: adopted, resurrected and alien ones."""

import json
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import redis
from django.db import connection

import outbox
from outbox import transitions
from outbox.events import Note
from outbox.lifecycle import publish
from outbox.lifecycle.reconcile import Findings, reconcile, strays
from outbox.models import OutboxEntry
from outbox.states import State
from tests import tasks
from tests.factories import AHEAD, PAST, ago, at, in_reach_for_long, make_entry, reread

pytestmark = pytest.mark.django_db(transaction=True)

APP = tasks.add.app


@pytest.fixture(autouse=True)
def _broker(valkey: redis.Redis) -> None:
    """Every test starts with an empty broker."""


def look(**how: Any) -> Findings:
    return reconcile(APP, using="default", **how)


def send(entry: OutboxEntry, *, queue: str = "celery", **headers: Any) -> bytes:
    """Put the entry's message into the queue, as a publisher that died before it marked."""
    body = {"task": entry.task, "id": str(entry.pk), **headers}
    message = {
        "body": "W10=",
        "headers": body,
        "properties": {"correlation_id": str(entry.pk), "delivery_tag": str(uuid4())},
    }
    raw = json.dumps(message).encode()
    with redis.Redis.from_url(APP.conf.broker_url) as client:
        client.lpush(queue, raw)
    return raw


def owed(**columns: Any) -> OutboxEntry:
    """Pending, due, and past the moment that is left to the on-commit publish."""
    times = {"available_at": at(PAST), "publish_after": at(PAST)}
    return make_entry(State.PENDING, **{**times, **columns})


# --- adopted ------------------------------------------------------------------------------------


def test_a_pending_entry_whose_message_is_queued_is_not_published_twice(
    valkey: redis.Redis,
) -> None:
    entry = owed()
    send(entry)
    assert look().adopted == 1
    after = reread(entry)
    assert (after.status, after.publishes, after.version) == (State.PUBLISHED, 1, 1)
    publish.dispatch(APP, using="default")
    assert valkey.llen("celery") == 1


@pytest.mark.parametrize(
    "columns",
    [
        pytest.param({"available_at": AHEAD}, id="not due: the backoff counts"),
        pytest.param({"publish_after": AHEAD}, id="the on-commit publish has its moment"),
        pytest.param({"queue": "other"}, id="its own queue is another one"),
        pytest.param({"task": "tests.tasks.echo"}, id="the message is another task's"),
    ],
)
def test_a_pending_entry_is_left_alone_where_its_message_does_not_count(
    columns: dict[str, Any],
) -> None:
    # From now, and not from when the tests were collected.
    entry = owed(**{name: at(v) if v is AHEAD else v for name, v in columns.items()})
    send(entry, task="tests.tasks.add")
    assert look().adopted == 0
    assert reread(entry).status == State.PENDING


def test_a_message_that_only_a_worker_has_adopts_nothing(valkey: redis.Redis) -> None:
    entry = owed()
    raw = send(entry)
    valkey.delete("celery")
    valkey.hset("unacked", "tag", json.dumps([json.loads(raw), "", "celery"]))
    assert look().adopted == 0
    assert reread(entry).status == State.PENDING


def before_adopting(monkeypatch: pytest.MonkeyPatch, step: Callable[[], object]) -> None:
    """Do `step` between the look that saw the message and the adoption of its row."""
    adopt = strays._adopt

    def late(*args: Any, **kwargs: Any) -> int:
        step()
        return adopt(*args, **kwargs)

    monkeypatch.setattr(strays, "_adopt", late)


def test_an_entry_that_a_worker_takes_and_gives_back_meanwhile_is_not_adopted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its message is gone with that run: a new life needs a new one."""
    entry = owed()
    send(entry)

    def run_and_release() -> None:
        transitions.publish([(entry.pk, 0)], using="default")
        token, owner = uuid4(), uuid4()
        who: dict[str, Any] = {
            "token": token,
            "owner": owner,
            "pid": 1,
            "lease": 60,
            "synced": True,
        }
        assert transitions.claim(entry.pk, task=entry.task, using="default", **who)
        holder, note = transitions.Holder(token=token), Note("test")
        assert transitions.release(entry.pk, holder=holder, note=note, using="default")

    before_adopting(monkeypatch, run_and_release)
    assert look().adopted == 0
    assert reread(entry).status == State.PENDING


def test_an_entry_that_is_cancelled_meanwhile_is_not_adopted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = owed()
    send(entry)
    before_adopting(monkeypatch, lambda: outbox.cancel(entry.pk, actor="user:ann"))
    assert look().adopted == 0
    assert reread(entry).status == State.CANCELLED


def test_an_entry_that_a_dispatcher_is_publishing_now_is_left_to_it(
    second: psycopg.Connection,
) -> None:
    """It has sent the message, and holds the row until it has marked it."""
    entry = owed()
    send(entry)
    with second.transaction():
        second.execute("SELECT FROM celery_outbox_entry FOR NO KEY UPDATE")
        assert look().adopted == 0  # and it does not wait for it
    assert look().adopted == 1


def test_the_on_commit_publisher_that_marks_late_counts_nothing_twice() -> None:
    entry = owed()
    send(entry)
    assert look().adopted == 1
    assert transitions.publish([(entry.pk, entry.version)], using="default") == 0
    assert reread(entry).publishes == 1


def test_adoptions_are_capped_per_pass(settings: Any) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "REPAIRS_PER_PASS": 2}
    for _ in range(5):
        send(owed())
    assert [look().adopted for _ in range(4)] == [2, 2, 1, 0]


# --- resurrected --------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.CANCELLED, State.FAILED, State.SUCCEEDED])
def test_a_message_of_an_entry_that_has_ended_is_counted_and_stays(
    valkey: redis.Redis, state: State
) -> None:
    entry = make_entry(state, finished_at=at(PAST))
    send(entry)
    found = look()
    assert (found.resurrected, found.removed) == (1, 0)
    assert reread(entry).status == state
    assert valkey.llen("celery") == 1


def test_where_asked_exactly_that_message_is_removed(valkey: redis.Redis) -> None:
    ended, other = make_entry(State.CANCELLED, finished_at=at(PAST)), owed()
    kept = [send(other), send(ended, queue="celery\x06\x166"), send(other)]
    valkey.delete("celery\x06\x166")
    gone = send(ended)
    kept.append(send(other))
    found = look(remove=True)
    assert (found.resurrected, found.removed) == (1, 1)
    left = valkey.lrange("celery", 0, -1)
    assert gone not in left
    assert set(left) == {kept[0], kept[2], kept[3]}


def test_removing_hides_no_message_behind_it_from_the_look(
    monkeypatch: pytest.MonkeyPatch, valkey: redis.Redis
) -> None:
    """What is taken out moves the rest of the list towards the head."""
    from outbox.brokers import redis as broker

    monkeypatch.setattr(broker, "_FIRST", 1)
    monkeypatch.setattr(broker, "LONGEST", 1)
    there = make_entry(State.PUBLISHED, published_at=at(PAST))
    send(there)
    for _ in range(3):
        send(make_entry(State.CANCELLED, finished_at=at(PAST)))
    found = look(remove=True)
    assert (found.removed, found.missing) == (3, 0)
    assert valkey.llen("celery") == 1


def test_a_message_whose_entry_is_requeued_meanwhile_is_not_removed(
    monkeypatch: pytest.MonkeyPatch, valkey: redis.Redis
) -> None:
    entry = make_entry(State.CANCELLED, finished_at=at(PAST))
    send(entry)
    remove = strays.remove

    def requeue_first(*args: Any) -> None:
        assert outbox.requeue(entry.pk, actor="user:ann")
        assert outbox.cancel(entry.pk, actor="user:ann")
        remove(*args)

    monkeypatch.setattr(strays, "remove", requeue_first)
    assert look(remove=True).removed == 0
    assert valkey.llen("celery") == 1


def test_an_entry_that_ends_during_the_look_is_not_resurrected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = make_entry(State.RUNNING)
    send(entry)
    see = strays.see

    def end_first(*args: Any) -> None:
        note = Note("worker")
        token = entry.claim_token
        assert token is not None
        transitions.fail(entry.pk, token=token, note=note, using="default")
        see(*args)

    monkeypatch.setattr(strays, "see", end_first)
    assert look().resurrected == 0


def test_the_message_of_an_external_task_is_not_resurrected() -> None:
    """Its entry has succeeded when the broker has it: it lies there for another code base."""
    columns = {"finished_at": at(PAST), "options": {"consumer": "external"}}
    send(make_entry(State.SUCCEEDED, **columns))
    assert look(remove=True).resurrected == 0


# --- alien --------------------------------------------------------------------------------------


def test_a_message_for_a_durable_task_without_an_entry_is_alien(valkey: redis.Redis) -> None:
    send(OutboxEntry(pk=uuid4(), task="tests.tasks.add"))
    assert look().alien == 1
    assert valkey.llen("celery") == 1


@pytest.mark.parametrize(
    ("task", "headers"),
    [
        pytest.param("tests.tasks.plain", {}, id="a plain task has no entries"),
        pytest.param("elsewhere.task", {}, id="a task of nobody knows whom"),
        pytest.param("tests.tasks.adopted", {}, id="the worker will make an entry of it"),
        pytest.param(
            "tests.tasks.add", {publish.DATABASE_HEADER: "other"}, id="its entry is elsewhere"
        ),
    ],
)
def test_a_message_that_needs_no_entry_here_is_not_alien(
    task: str, headers: dict[str, Any]
) -> None:
    send(OutboxEntry(pk=uuid4(), task=task), **headers)
    assert look().alien == 0


def test_a_message_without_a_uuid_is_passed_over(valkey: redis.Redis) -> None:
    valkey.lpush("celery", "no JSON", json.dumps({"properties": {"correlation_id": "own-id"}}))
    found = look()
    assert (found.queued, found.alien) == (2, 0)


# --- dry runs -----------------------------------------------------------------------------------


def everything() -> list[list[tuple[Any, ...]]]:
    """Every row that a pass may write."""
    tables = ("celery_outbox_entry", "celery_outbox_event", "celery_outbox_tick")
    with connection.cursor() as cursor:
        found = []
        for table in (*tables, "django_celery_results_taskresult"):
            cursor.execute(f"SELECT * FROM {table} ORDER BY 1")
            found.append(cursor.fetchall())
        return found


def test_a_dry_run_says_what_a_pass_would_do_and_changes_nothing(valkey: redis.Redis) -> None:
    make_entry(State.RUNNING, lease_until=at(PAST))
    make_entry(State.CANCELLED, lease_owner=uuid4(), lease_until=at(PAST), finished_at=at(PAST))
    make_entry(expires_at=at(PAST))
    make_entry(State.PUBLISHED, published_at=at(PAST))
    lost = {"published_at": at(PAST), "missing_since": at(PAST)}
    make_entry(State.PUBLISHED, **lost)
    held = make_entry(State.PUBLISHED, **lost)
    raw = json.loads(send(held))
    valkey.delete("celery")
    valkey.hset("unacked", "tag", json.dumps([raw, "", "celery"]))
    send(owed())
    send(make_entry(State.CANCELLED, finished_at=at(PAST)))
    send(OutboxEntry(pk=uuid4(), task="tests.tasks.add"))
    make_entry(State.RUNNING, due_at=ago(days=1))
    in_reach_for_long()
    queued, before = valkey.lrange("celery", 0, -1), everything()

    would = look(dry=True, remove=True)
    assert everything() == before
    assert valkey.lrange("celery", 0, -1) == queued
    assert vars(would) == vars(look(remove=True))
    counted = ("expired", "crashed", "settled", "missing", "stranded", "orphaned", "adopted")
    assert {name: getattr(would, name) for name in counted} == dict.fromkeys(counted, 1)
    more = ("resurrected", "removed", "alien", "over_age")
    assert {name: getattr(would, name) for name in more} == dict.fromkeys(more, 1)
    assert (would.mismatched, would.queued) == (2, 3)


def test_a_dry_run_neither_needs_the_lease_nor_touches_the_tick() -> None:
    from outbox import maintenance, ticks

    def meanwhile(renew: ticks.Renew) -> ticks.Found:
        return maintenance.would_reconcile(APP, using="default")

    assert ticks.run_alone("reconcile", meanwhile, lease=60, using="default") is not None

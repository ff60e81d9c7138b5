"""publish: on commit and by the dispatcher, with a broker that is there, down or hung."""

import json
import signal
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import psutil
import pytest
import redis
from celery import signals
from django.db import connection, transaction

from outbox import maintenance
from outbox.brokers import sender
from outbox.embedded import Servers
from outbox.errors import BrokerUnavailable
from outbox.lifecycle import publish
from outbox.models import OutboxEntry, OutboxQueue, OutboxTick
from outbox.states import State
from tests import tasks
from tests.factories import AHEAD, PAST, ago, at, in_reach_for_long, make_entry, reread

pytestmark = pytest.mark.django_db(transaction=True)

APP = tasks.add.app


@pytest.fixture(autouse=True)
def _broker(valkey: redis.Redis) -> None:
    """Every test publishes to an empty broker."""


def dispatch() -> int:
    return publish.dispatch(APP, using="default")


def messages(valkey: redis.Redis, queue: str = "celery") -> list[dict[str, Any]]:
    return [json.loads(raw) for raw in valkey.lrange(queue, 0, -1)]


def body_of(message: dict[str, Any]) -> Any:
    import base64

    return json.loads(base64.b64decode(message["body"]))


def test_the_dispatcher_publishes_what_is_due_under_the_entrys_id(valkey: redis.Redis) -> None:
    entry = make_entry(State.PENDING)
    assert dispatch() == 1
    (message,) = messages(valkey)
    assert message["headers"]["id"] == message["properties"]["correlation_id"] == str(entry.pk)
    after = reread(entry)
    assert (after.status, after.publishes) == (State.PUBLISHED, 1)
    assert after.published_at is not None


def test_the_message_is_a_hint_without_arguments_eta_or_expiry(valkey: redis.Redis) -> None:
    make_entry(State.PENDING, args=["secret"], kwargs={"a": "secret"}, expires_at=at(AHEAD))
    dispatch()
    raw = valkey.lrange("celery", 0, -1)[0]
    assert b"secret" not in raw
    (message,) = messages(valkey)
    assert body_of(message)[:2] == [[], {}]
    assert (message["headers"]["eta"], message["headers"]["expires"]) == (None, None)


def test_a_task_may_put_its_arguments_into_the_message(valkey: redis.Redis) -> None:
    tasks.adopted.delay("/some/path")
    (message,) = messages(valkey)
    assert body_of(message)[0] == ["/some/path"]
    assert "/some/path" in message["headers"]["argsrepr"]


def test_time_limits_and_custom_headers_are_in_the_message(valkey: redis.Redis) -> None:
    tasks.add.apply_async((1, 2), time_limit=9, soft_time_limit=8, headers={"tenant": "a"})
    headers = messages(valkey)[0]["headers"]
    assert headers["timelimit"] == [9, 8]
    assert headers["tenant"] == "a"


def test_priority_chooses_the_list_of_the_queue(valkey: redis.Redis) -> None:
    tasks.add.apply_async((1, 2), priority=6)
    assert valkey.llen("celery") == 0
    assert valkey.llen("celery\x06\x166") == 1


@pytest.mark.parametrize(
    "columns",
    [
        {"available_at": AHEAD},
        {"publish_after": AHEAD},
        {"queue": "paused"},
        {"status": State.PUBLISHED},
    ],
)
def test_what_is_not_due_is_left_alone(columns: dict[str, Any]) -> None:
    OutboxQueue.objects.create(name="paused", paused=True)
    given: dict[str, Any] = {
        name: at(v) if isinstance(v, timedelta) else v for name, v in columns.items()
    }
    entry = make_entry(given.pop("status", State.PENDING), **given)
    assert dispatch() == 0
    assert reread(entry).version == 0


def test_more_than_a_batch_is_dispatched_in_batches(
    settings: Any, django_assert_num_queries: Any, valkey: redis.Redis
) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "BATCH_SIZE": 2}
    for _ in range(5):
        make_entry(State.PENDING)
    with django_assert_num_queries(3 * 5):  # BEGIN, SET LOCAL, SELECT, UPDATE, COMMIT
        assert dispatch() == 5
    assert valkey.llen("celery") == 5


def test_two_dispatchers_share_the_rows_and_publish_none_twice(valkey: redis.Redis) -> None:
    first = make_entry(State.PENDING)
    make_entry(State.PENDING)
    with transaction.atomic():
        held = OutboxEntry.objects.select_for_update(no_key=True).get(pk=first.pk)
        other = _in_a_thread(dispatch)
        assert other == 1
    assert reread(held).status == State.PENDING
    assert valkey.llen("celery") == 1


def _in_a_thread(work: Any) -> Any:
    from concurrent.futures import ThreadPoolExecutor

    def call() -> Any:
        try:
            return work()
        finally:
            connection.close()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(timeout=30)


def test_a_row_that_cannot_be_rendered_fails_alone(valkey: redis.Redis) -> None:
    poison = make_entry(State.PENDING, options={"headers": ["no", "dict"]}, available_at=at(PAST))
    good = make_entry(State.PENDING)
    dispatch()
    after = reread(poison)
    assert (after.status, reread(good).status) == (State.FAILED, State.PUBLISHED)
    assert "cannot be rendered" in after.error
    assert after.attempts == 0
    assert valkey.llen("celery") == 1


@pytest.mark.parametrize("columns", [{"args": {"a": 1}}, {"kwargs": [1]}])
def test_arguments_of_another_shape_by_plain_sql_fail_alone(columns: dict[str, Any]) -> None:
    poison, good = make_entry(State.PENDING, **columns), make_entry(State.PENDING)
    dispatch()
    assert (reread(poison).status, reread(good).status) == (State.FAILED, State.PUBLISHED)
    assert "JSON" in reread(poison).error


LOOKS_TYPED = {"__type__": "date", "__value__": "no date"}  # as kombu writes a date


@pytest.mark.parametrize(
    "columns",
    [
        {"options": ["no object"]},
        {"options": {"headers": {"day": LOOKS_TYPED}}},
        {"args": [LOOKS_TYPED], "options": {"payload": "message"}},
    ],
)
def test_a_row_that_no_worker_could_decode_fails_alone(
    columns: dict[str, Any], valkey: redis.Redis
) -> None:
    poison, good = make_entry(State.PENDING, **columns), make_entry(State.PENDING)
    dispatch()
    assert (reread(poison).status, reread(good).status) == (State.FAILED, State.PUBLISHED)
    assert "cannot be rendered" in reread(poison).error
    assert valkey.llen("celery") == 1


def test_arguments_that_only_look_typed_stay_what_they_are(valkey: redis.Redis) -> None:
    entry = make_entry(State.PENDING, args=[LOOKS_TYPED, {"__type__": ["odd"], "__value__": 1}])
    dispatch()
    after = reread(entry)
    assert after.status == State.PUBLISHED
    assert after.args == [LOOKS_TYPED, {"__type__": ["odd"], "__value__": 1}]


def test_a_lower_id_that_commits_after_a_higher_one_is_not_passed_over() -> None:
    low, high = sorted([uuid4(), uuid4()])
    make_entry(State.PENDING, id=high)
    dispatch()
    late = make_entry(State.PENDING, id=low)
    dispatch()
    assert reread(late).status == State.PUBLISHED


def test_a_task_of_another_code_base_is_done_once_the_broker_has_it(valkey: redis.Redis) -> None:
    entry = make_entry(State.PENDING, task="elsewhere.run", options={"consumer": "external"})
    dispatch()
    assert reread(entry).status == State.SUCCEEDED
    assert body_of(messages(valkey)[0])[0] == [1, 2]


def test_after_task_publish_fires_for_what_was_published() -> None:
    seen = []

    def receive(sender: str, headers: dict[str, Any], **_: Any) -> None:
        seen.append(headers["id"])

    signals.after_task_publish.connect(receive)
    try:
        on_commit = tasks.add.delay(1, 2)
        dispatched = make_entry(State.PENDING)
        dispatch()
    finally:
        signals.after_task_publish.disconnect(receive)
    assert seen == [on_commit.id, str(dispatched.pk)]


@pytest.fixture
def dead_broker(servers: Servers) -> Iterator[None]:
    servers.valkey.kill()
    yield
    servers.valkey.start()
    sender.close_breaker()


@pytest.fixture
def hung_broker(servers: Servers) -> Iterator[None]:
    process = psutil.Process(servers.valkey.pid)
    process.suspend()
    yield
    process.send_signal(signal.SIGCONT)
    sender.close_breaker()


@pytest.mark.usefixtures("dead_broker")
def test_the_row_is_there_when_the_broker_is_down() -> None:
    entry = OutboxEntry.objects.get(pk=tasks.add.delay(1, 2).id)
    assert (entry.status, entry.publishes, entry.attempts) == (State.PENDING, 0, 0)


@pytest.mark.usefixtures("hung_broker")
def test_a_broker_that_never_answers_holds_neither_the_caller_nor_the_rows(settings: Any) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "PUBLISH_TIMEOUT": 0.2}
    entry = make_entry(State.PENDING)
    assert OutboxEntry.objects.get(pk=tasks.add.delay(1, 2).id).status == State.PENDING
    sender.close_breaker()
    with pytest.raises(BrokerUnavailable):
        dispatch()
    assert reread(entry).status == State.PENDING


@pytest.mark.usefixtures("dead_broker")
def test_a_broken_broker_is_left_alone_for_a_moment() -> None:
    make_entry(State.PENDING)
    with pytest.raises(BrokerUnavailable, match="did not take"):
        dispatch()
    with pytest.raises(BrokerUnavailable, match="left alone"):
        dispatch()


@pytest.mark.usefixtures("dead_broker")
def test_the_tick_records_that_the_broker_was_away_and_sweeps_all_the_same() -> None:
    late = make_entry(State.PUBLISHED, expires_at=at(PAST))
    make_entry(State.PENDING)
    found = maintenance.dispatch(APP, using="default")
    assert found["published"] == 0
    assert "did not take" in found["broker"]
    assert reread(late).status == State.FAILED
    assert OutboxTick.objects.get(name="dispatch").findings == found


def test_after_an_outage_the_same_connection_publishes_again(servers: Servers) -> None:
    tasks.add.delay(1, 2)
    servers.valkey.kill()
    waiting = OutboxEntry.objects.get(pk=tasks.add.delay(1, 2).id)
    servers.valkey.start()
    sender.close_breaker()
    OutboxEntry.objects.filter(pk=waiting.pk).update(publish_after=at(PAST))
    assert dispatch() == 1
    assert reread(waiting).status == State.PUBLISHED


REFUSED = "cachekey"  # a queue whose name is a string's key: WRONGTYPE


def refused_and_good(valkey: redis.Redis, *, good: int) -> tuple[OutboxEntry, list[OutboxEntry]]:
    valkey.set(REFUSED, "something else")
    first = [make_entry(State.PENDING, queue=f"q{number % 2}") for number in range(good // 2)]
    bad = make_entry(State.PENDING, queue=REFUSED)
    rest = [make_entry(State.PENDING, queue=f"q{number % 2}") for number in range(good // 2)]
    return bad, first + rest


def dispatch_all_again() -> int:
    OutboxEntry.objects.filter(status=State.PENDING).update(publish_after=at(PAST))
    return dispatch()


def test_a_queue_that_the_broker_refuses_fails_alone(valkey: redis.Redis) -> None:
    bad, good = refused_and_good(valkey, good=20)
    assert dispatch() == 20
    assert {(reread(one).status, reread(one).publishes) for one in good} == {(State.PUBLISHED, 1)}
    assert (reread(bad).status, reread(bad).publishes) == (State.PENDING, 0)
    at_first = valkey.llen("q0") + valkey.llen("q1")
    assert at_first <= 20 + 2  # one more for each list, to find out which is refused
    assert dispatch_all_again() == 0
    more = [make_entry(State.PENDING, queue="q0") for _ in range(5)]
    assert dispatch_all_again() == 5
    assert {reread(one).status for one in more} == {State.PUBLISHED}
    assert valkey.llen("q0") + valkey.llen("q1") == at_first + 5  # known now: nothing is repeated


def test_a_refused_queue_is_named_in_the_log_without_its_message_and_closes_nothing(
    valkey: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    refused_and_good(valkey, good=2)
    dispatch()
    (said,) = [r.getMessage() for r in caplog.records if "publish.refused" in r.getMessage()]
    assert said.startswith(f"outbox.publish.refused queue={REFUSED} priority=0: WRONGTYPE")
    assert "headers" not in said
    make_entry(State.PENDING)
    assert dispatch() == 1  # the breaker is open to the others


def test_what_is_refused_is_tried_again_after_a_growing_pause(valkey: redis.Redis) -> None:
    bad, _ = refused_and_good(valkey, good=0)
    pauses = []
    for waited in (0, 60, 120, 7200):
        due = {"available_at": ago(seconds=waited), "publish_after": at(PAST)}
        OutboxEntry.objects.filter(pk=bad.pk).update(**due)
        dispatch()
        assert dispatch() == 0
        pauses.append((reread(bad).publish_after - at()).total_seconds())
    assert pauses == [pytest.approx(seconds, abs=5) for seconds in (1, 60, 120, 600)]


def test_a_queue_that_is_no_longer_refused_is_published_to(valkey: redis.Redis) -> None:
    bad, _ = refused_and_good(valkey, good=2)
    dispatch()
    valkey.delete(REFUSED)
    assert dispatch_all_again() == 1
    assert (reread(bad).status, valkey.llen(REFUSED)) == (State.PUBLISHED, 1)


def test_on_commit_a_refused_queue_keeps_no_other_back(
    valkey: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    valkey.set(REFUSED, "something else")
    with transaction.atomic():
        bad = tasks.add.apply_async((1, 2), queue=REFUSED)
        good = tasks.add.apply_async((1, 2), queue="q")
    assert OutboxEntry.objects.get(pk=good.id).status == State.PUBLISHED
    assert OutboxEntry.objects.get(pk=bad.id).status == State.PENDING
    assert f"outbox.publish.refused queue={REFUSED}" in caplog.text


def test_where_messages_are_sent_one_by_one_a_refused_one_fails_alone_as_well(
    valkey: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "_can_batch", lambda producer: False)
    bad, good = refused_and_good(valkey, good=4)
    assert dispatch() == 4
    assert {reread(one).status for one in good} == {State.PUBLISHED}
    assert reread(bad).status == State.PENDING
    assert valkey.llen("q0") + valkey.llen("q1") == 4


def test_a_broker_whose_memory_is_full_refuses_no_single_queue(valkey: redis.Redis) -> None:
    entry = make_entry(State.PENDING)
    valkey.config_set("maxmemory", 1)
    try:
        with pytest.raises(BrokerUnavailable, match="did not take"):
            dispatch()
    finally:
        valkey.config_set("maxmemory", 0)
    assert reread(entry).publish_after == entry.publish_after


def test_a_paused_queue_is_not_published_to_on_commit_either(valkey: redis.Redis) -> None:
    OutboxQueue.objects.create(name="celery", paused=True)
    assert OutboxEntry.objects.get(pk=tasks.add.delay(1, 2).id).status == State.PENDING
    assert OutboxEntry.objects.get(pk=tasks.add.apply_async((1, 2), queue="q").id).publishes == 1
    assert valkey.llen("celery") == 0


def test_a_paused_outbox_publishes_nothing(settings: Any, valkey: redis.Redis) -> None:
    in_reach_for_long()
    settings.OUTBOX = {**settings.OUTBOX, "PAUSED": True}
    entry = OutboxEntry.objects.get(pk=tasks.add.delay(1, 2).id)
    assert maintenance.dispatch(APP, using="default") == {
        "expired": 0,
        "crashed": 0,
        "settled": 0,
        "paused": True,
    }
    assert reread(entry).status == State.PENDING
    assert valkey.llen("celery") == 0

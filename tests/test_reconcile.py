"""reconcile: what is published in the database against what the broker really holds."""

import json
from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import redis

from outbox import maintenance
from outbox.brokers import redis as broker
from outbox.lifecycle import lease, publish
from outbox.lifecycle.reconcile import Findings, reconcile, strands
from outbox.lifecycle.reconcile import published as publishing
from outbox.models import OutboxEntry, OutboxWorker
from outbox.states import State
from tests import tasks
from tests.factories import (
    AHEAD,
    PAST,
    ago,
    at,
    in_reach_for_long,
    make_entries,
    make_entry,
    reread,
)

pytestmark = pytest.mark.django_db(transaction=True)

APP = tasks.add.app


@pytest.fixture(autouse=True)
def _broker(valkey: redis.Redis) -> None:
    """Every test starts with an empty broker."""


def look() -> Findings:
    return reconcile(APP, using="default")


def published(**columns: Any) -> OutboxEntry:
    """Published long ago, and really in the broker."""
    entry = make_entry(State.PENDING, **columns)
    publish.dispatch(APP, using="default")
    OutboxEntry.objects.filter(pk=entry.pk).update(published_at=at(PAST))
    return reread(entry)


def seen_missing_before(entry: OutboxEntry) -> None:
    assert look().missing == 1
    OutboxEntry.objects.filter(pk=entry.pk).update(missing_since=at(PAST))


def test_a_lost_message_is_published_again_after_two_looks(valkey: redis.Redis) -> None:
    entry = published()
    valkey.flushdb()
    first = look()
    assert (first.missing, first.stranded) == (1, 0)
    assert look().stranded == 0  # too soon after the first
    OutboxEntry.objects.filter(pk=entry.pk).update(missing_since=at(PAST))
    assert look().stranded == 1
    after = reread(entry)
    assert (after.status, after.strands, after.missing_since) == (State.PENDING, 1, None)
    assert after.events.get().verb == "strand"
    publish.dispatch(APP, using="default")
    assert valkey.llen("celery") == 1


def test_a_pass_does_not_confirm_what_it_has_seen_itself(
    settings: Any, valkey: redis.Redis
) -> None:
    """However long it takes: here two looks may be as close as a thousandth of a second."""
    settings.OUTBOX = {**settings.OUTBOX, "RECONCILE_EVERY": 0.002}
    published()
    valkey.flushdb()
    first = look()
    assert (first.missing, first.stranded) == (1, 0)
    assert look().stranded == 1


def test_what_only_a_worker_has_is_not_told_as_missing(valkey: redis.Redis) -> None:
    """It may have taken it a moment ago, and not have said yet that it holds it."""
    entry = published()
    taken(valkey)
    assert look().missing == 0
    assert reread(entry).missing_since is not None


def test_what_a_tick_strands_it_publishes_at_once(valkey: redis.Redis) -> None:
    entry = published()
    valkey.flushdb()
    seen_missing_before(entry)
    found = maintenance.recover(APP, using="default")
    assert found is not None
    assert found["stranded"] == 1
    assert reread(entry).status == State.PUBLISHED
    assert valkey.llen("celery") == 1


def test_a_message_that_waits_in_a_deep_queue_is_not_stranded(valkey: redis.Redis) -> None:
    entries = [published() for _ in range(3)]
    for _ in range(1200):  # more than two reads of the list
        valkey.lpush("celery", json.dumps({"properties": {"correlation_id": str(uuid4())}}))
    found = look()
    assert (found.missing, found.stranded) == (0, 0)
    assert {reread(entry).status for entry in entries} == {State.PUBLISHED}


@pytest.mark.parametrize("priority", [0, 3, 6, 9])
def test_every_priority_list_of_the_queue_is_read(priority: int) -> None:
    published(priority=priority, queue="other")
    assert look().missing == 0


def taken(valkey: redis.Redis) -> None:
    """Move the message from its list to `unacked`, as a worker does that takes it."""
    raw = valkey.rpop("celery")
    assert isinstance(raw, bytes)
    valkey.hset("unacked", "tag", json.dumps([json.loads(raw), "", "celery"]))


def living_worker(**columns: Any) -> OutboxWorker:
    return OutboxWorker.objects.create(hostname="w", heartbeat_at=at(), **columns)


def test_a_message_that_a_living_worker_holds_is_not_missing(valkey: redis.Redis) -> None:
    entry = published()
    taken(valkey)
    living_worker(holds=[str(entry.pk)])
    assert look().missing == 0


@pytest.mark.parametrize("columns", [{"heartbeat_at": at(PAST)}, {"stopped_at": at()}])
def test_a_message_that_only_a_dead_worker_holds_is_published_again_after_a_lease(
    valkey: redis.Redis, columns: dict[str, Any]
) -> None:
    entry = published()
    taken(valkey)
    OutboxWorker.objects.create(hostname="w", holds=[str(entry.pk)], **columns)
    look()
    assert reread(entry).missing_since is not None
    just_under_a_lease = at(timedelta(seconds=-1.5))  # the tests' lease is 2 s
    OutboxEntry.objects.filter(pk=entry.pk).update(missing_since=just_under_a_lease)
    found = look()
    assert (found.stranded, found.orphaned) == (0, 0)
    OutboxEntry.objects.filter(pk=entry.pk).update(missing_since=at(PAST))
    assert look().orphaned == 1
    assert "gone" in entry.events.get().reason


def test_a_message_that_comes_back_is_no_longer_missing(valkey: redis.Redis) -> None:
    entry = published()
    raw = valkey.rpop("celery")
    assert isinstance(raw, bytes)
    seen_missing_before(entry)
    valkey.lpush("celery", raw)
    assert look().stranded == 0
    assert reread(entry).missing_since is None


def test_a_fresh_entry_is_left_alone_within_the_grace(valkey: redis.Redis) -> None:
    tasks.add.delay(1, 2)
    valkey.flushdb()
    assert look().missing == 0


def test_a_claim_between_two_looks_is_not_stranded(valkey: redis.Redis) -> None:
    entry = published()
    valkey.flushdb()
    seen_missing_before(entry)
    running = make_entry(State.RUNNING)
    OutboxEntry.objects.filter(pk=entry.pk).update(
        status=State.RUNNING,
        claim_token=running.claim_token,
        lease_owner=running.lease_owner,
        lease_until=at(AHEAD),
        started_at=at(),
        attempts=1,
    )
    assert look().stranded == 0
    assert reread(entry).status == State.RUNNING


def test_repairs_are_capped_per_pass(settings: Any, valkey: redis.Redis) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "REPAIRS_PER_PASS": 1}
    for _ in range(2):
        published()
    valkey.flushdb()
    assert look().missing == 2
    OutboxEntry.objects.update(missing_since=at(PAST))
    assert [look().stranded for _ in range(3)] == [1, 1, 0]


def test_a_row_that_was_stranded_waits_longer_each_time_before_it_may_be_stranded_again(
    valkey: redis.Redis,
) -> None:
    """The tests' grace is 1 s: after three strands it is 8 s, and never more than 10 minutes."""
    entry = make_entry(State.PUBLISHED, published_at=ago(seconds=6), strands=3)
    assert look().missing == 0
    OutboxEntry.objects.filter(pk=entry.pk).update(missing_since=ago(seconds=5))
    assert look().stranded == 0
    OutboxEntry.objects.filter(pk=entry.pk).update(published_at=ago(seconds=10))
    assert look().stranded == 1
    often = make_entry(State.PUBLISHED, published_at=ago(minutes=9), strands=10_000)
    assert look().missing == 0
    OutboxEntry.objects.filter(pk=often.pk).update(published_at=ago(minutes=11))
    assert look().missing == 1


def test_a_row_that_was_published_anew_during_the_look_is_not_missing(
    monkeypatch: pytest.MonkeyPatch, valkey: redis.Redis
) -> None:
    """Its message lands at the head of a list that has been read already."""
    entry = make_entry(State.PUBLISHED, published_at=at(PAST))
    read = broker.unacked

    def publish_again(seen: broker.Look) -> Any:
        OutboxEntry.objects.filter(pk=entry.pk).update(published_at=at())
        return read(seen)

    monkeypatch.setattr(broker, "unacked", publish_again)
    assert look().missing == 0
    assert reread(entry).missing_since is None


def test_a_message_that_a_living_worker_holds_is_not_missing_though_the_broker_lost_it(
    valkey: redis.Redis,
) -> None:
    entry = published()
    living_worker(holds=[str(entry.pk)])
    valkey.flushdb()
    assert look().missing == 0


def test_a_row_that_was_seen_again_is_not_stranded_though_somebody_holds_it(
    monkeypatch: pytest.MonkeyPatch, second: psycopg.Connection
) -> None:
    """Its mark cannot be taken back while it is locked; its message is there all the same."""
    entry = published()
    OutboxEntry.objects.filter(pk=entry.pk).update(missing_since=at(PAST))
    unmark = strands.unmark

    def while_it_is_locked(*args: Any) -> int:
        with second.transaction():
            second.execute("SELECT FROM celery_outbox_entry FOR UPDATE")
            return unmark(*args)

    monkeypatch.setattr(strands, "unmark", while_it_is_locked)
    assert look().stranded == 0
    after = reread(entry)
    assert (after.status, after.missing_since is None) == (State.PUBLISHED, False)


def test_a_lost_message_is_found_behind_any_number_that_wait(
    monkeypatch: pytest.MonkeyPatch, valkey: redis.Redis
) -> None:
    """Nobody consumes their queue, and they are older: they must not hide it for ever."""
    monkeypatch.setattr(publishing, "PAGE", 2)
    for entry in make_entries(5, State.PENDING, queue="unconsumed"):
        publish.dispatch(APP, using="default")
        OutboxEntry.objects.filter(pk=entry.pk).update(published_at=at(10 * PAST))
    lost = make_entry(State.PUBLISHED, published_at=at(PAST))
    assert look().missing == 1
    assert reread(lost).missing_since is not None


def test_a_lapsed_lease_is_a_crash_with_backoff() -> None:
    in_reach_for_long()
    entry = make_entry(State.RUNNING, lease_until=at(PAST), crash_limit=3)
    assert look().crashed == 1
    after = reread(entry)
    assert (after.status, after.crashes) == (State.PENDING, 1)
    assert after.events.get().reason == "its lease ran out: the worker is gone"


def test_a_lease_that_holds_is_never_taken_however_old_the_run() -> None:
    entry = make_entry(State.RUNNING, started_at=at(1000 * PAST), created_at=at(1000 * PAST))
    assert look().crashed == 0
    assert reread(entry).status == State.RUNNING


def test_nothing_is_crashed_before_the_database_has_been_up_for_a_lease(settings: Any) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "LEASE": 10_000_000}
    entry = make_entry(State.RUNNING, lease_until=at(PAST))
    assert "crashed" not in lease.sweep(using="default")
    assert reread(entry).status == State.RUNNING


def test_a_cancelled_run_whose_lease_ran_out_is_settled() -> None:
    in_reach_for_long()
    entry = make_entry(State.CANCELLED, lease_owner=uuid4(), lease_pid=1, lease_until=at(PAST))
    assert look().settled == 1
    assert not reread(entry).run_goes_on


@pytest.mark.parametrize("state", [State.PENDING, State.PUBLISHED])
@pytest.mark.parametrize(
    ("column", "words"), [("expires_at", "expired at"), ("deadline_at", "retry deadline")]
)
def test_what_is_too_late_to_start_fails_and_says_why(
    state: State, column: str, words: str
) -> None:
    entry = make_entry(state, **{column: at(PAST)})
    assert look().expired == 1
    after = reread(entry)
    assert after.status == State.FAILED
    assert words in after.error


def test_a_queue_that_the_broker_refuses_to_list_hides_no_other(valkey: redis.Redis) -> None:
    hidden = published(queue="cachekey")
    lost = published(queue="other")
    marked = published(queue="cachekey")
    waiting = make_entry(State.PENDING, queue="cachekey", available_at=at(PAST))
    OutboxEntry.objects.filter(pk=marked.pk).update(missing_since=at(PAST))
    valkey.flushdb()
    valkey.set("cachekey", "something else")
    seen = look()
    assert (seen.missing, seen.stranded, seen.adopted, seen.broker) == (1, 0, 0, "")
    assert seen.skipped.startswith("The broker refuses to list the queue cachekey: WRONGTYPE")
    assert reread(lost).missing_since is not None
    assert reread(hidden).missing_since is None
    assert (reread(marked).status, reread(waiting).status) == (State.PUBLISHED, State.PENDING)
    OutboxEntry.objects.filter(pk=lost.pk).update(missing_since=at(PAST))
    assert look().stranded == 1

"""A cancellation holds on every path, and ends exactly the run that it was asked to end."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from celery import current_app
from django.contrib.auth.models import Group
from django.db import transaction

import outbox
from outbox import maintenance
from outbox.drill.processes import Process
from outbox.models import OutboxEntry
from outbox.states import State
from outbox.worker.runs import Run, runs
from tests import tasks
from tests.factories import make_entry, reread
from tests.following import APP, entry_of
from tests.waiting import runs as is_running
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]


def settled(result: Any) -> OutboxEntry:
    """Wait until its cancelled run is over."""
    wait_until(lambda: not entry_of(result).run_goes_on, timeout=30)
    entry = entry_of(result)
    assert entry.status == State.CANCELLED
    assert entry.lease_until is None
    return entry


def children(worker: Process) -> set[int]:
    return {child.pid for child in psutil.Process(worker.pid).children()}


def begun(notes: Path, times: int = 1) -> None:
    wait_until(lambda: notes.exists() and notes.read_text().count("start") == times)


# What a run does after it was cancelled changes nothing.


@pytest.mark.parametrize(
    "task", [tasks.slow, tasks.failing_late], ids=["then it succeeds", "then it asks for a retry"]
)
def test_what_a_cancelled_run_ends_with_is_discarded(
    start_worker: Start, tmp_path: Path, task: Any
) -> None:
    start_worker()
    notes, until = tmp_path / "notes", tmp_path / "until"
    result = task.delay(str(notes), str(until))
    begun(notes)
    assert outbox.cancel(result.id, actor="user:ann", reason="sold out")
    assert entry_of(result).run_goes_on
    assert not outbox.requeue(result.id, actor="user:ann")
    until.touch()
    entry = settled(result)
    assert (entry.attempts, entry.failures, entry.crashes, entry.result) == (1, 0, 0, None)
    assert list(entry.events.values_list("verb", flat=True)) == ["cancel", "late", "settle"]
    maintenance.dispatch(APP, using="default")
    assert entry_of(result).version == entry.version


def test_a_cancelled_run_that_meets_its_time_limit_is_settled(
    start_worker: Start, tmp_path: Path
) -> None:
    start_worker()
    notes = tmp_path / "notes"
    result = tasks.limited_noted.delay(str(notes))
    begun(notes)
    outbox.cancel(result.id, actor="user:ann")
    entry = settled(result)
    assert (entry.attempts, entry.failures, entry.crashes) == (1, 0, 0)


def test_a_cancelled_entry_that_the_broker_lost_stays_cancelled(
    start_worker: Start, valkey: redis.Redis, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    result = tasks.noted.delay(str(notes))
    outbox.cancel(result.id, actor="user:ann")
    valkey.flushdb()
    start_worker()
    for _ in range(3):
        maintenance.reconcile(APP, using="default")
    tasks.noted.delay(str(tmp_path / "other"))
    wait_until((tmp_path / "other").exists)
    assert entry_of(result).status == State.CANCELLED
    assert not notes.exists()


# In the body


def test_a_body_that_asks_leaves_when_it_is_cancelled(start_worker: Start, tmp_path: Path) -> None:
    worker = start_worker()
    before = children(worker)
    notes = tmp_path / "notes"
    result = tasks.polite.delay(str(notes))
    begun(notes)
    outbox.cancel(result.id, actor="user:ann")
    entry = settled(result)
    assert notes.read_text().splitlines() == ["start", "it saw that it was cancelled"]
    assert entry.events.get(verb="settle").reason == "it saw that it was cancelled"
    assert children(worker) == before


def test_an_atomic_body_that_asks_rolls_back(start_worker: Start, tmp_path: Path) -> None:
    start_worker()
    notes = tmp_path / "notes"
    result = tasks.polite_group.delay(str(notes), "never")
    begun(notes)
    outbox.cancel(result.id, actor="user:ann")
    settled(result)
    assert not Group.objects.exists()


def test_a_body_that_asks_leaves_when_another_run_owns_it(
    start_worker: Start, tmp_path: Path
) -> None:
    first = start_worker("-c", "1")
    notes = tmp_path / "notes"
    result = tasks.polite.delay(str(notes))
    begun(notes)
    os.killpg(first.pid, signal.SIGSTOP)
    start_worker("-c", "1", name="second")
    begun(notes, times=2)
    os.killpg(first.pid, signal.SIGCONT)
    wait_until(lambda: "it is another run's now" in notes.read_text(), timeout=30)
    assert entry_of(result).status == State.RUNNING
    outbox.cancel(result.id, actor="user:ann")
    settled(result)


def test_called_plainly_it_asks_nobody() -> None:
    tasks.polite.raise_if_cancelled()


# Ending a run


def test_terminate_kills_exactly_the_child_that_runs_it(
    start_worker: Start, tmp_path: Path
) -> None:
    worker = start_worker()
    before = children(worker)
    notes, until = tmp_path / "notes", tmp_path / "until"
    doomed = tasks.slow.delay(str(notes), str(until))
    spared = tasks.slow.delay(str(notes), str(until))
    begun(notes, times=2)
    killed = entry_of(doomed).lease_pid
    assert outbox.cancel(doomed.id, actor="user:ann", terminate=True)
    entry = settled(doomed)
    assert (entry.attempts, entry.crashes) == (1, 0)
    assert before - children(worker) == {killed}
    assert worker.alive
    assert outbox.requeue(doomed.id, actor="user:ann")
    until.touch()
    succeeded = OutboxEntry.objects.filter(status=State.SUCCEEDED)
    wait_until(lambda: succeeded.count() == 2, timeout=30)
    assert (entry_of(doomed).attempts, entry_of(spared).attempts) == (2, 1)
    assert notes.read_text().count(f"start {spared.id}") == 1


def test_terminate_waits_for_the_commit_and_reaches_what_was_cancelled_before(
    start_worker: Start, tmp_path: Path
) -> None:
    start_worker()
    notes = tmp_path / "notes"
    result = tasks.slow.delay(str(notes), str(tmp_path / "never"))
    begun(notes)
    pid = entry_of(result).lease_pid
    assert pid is not None
    with transaction.atomic():
        outbox.cancel(result.id, actor="user:ann", terminate=True)
        transaction.set_rollback(True)
    assert (entry_of(result).status, is_running(pid)) == (State.RUNNING, True)
    outbox.cancel(result.id, actor="user:ann")
    assert is_running(pid)
    assert not outbox.cancel(result.id, actor="user:ann", terminate=True)
    settled(result)
    assert not is_running(pid)


def test_terminate_ends_a_greenlet(start_worker: Start, tmp_path: Path) -> None:
    worker = start_worker("--pool=gevent")
    notes = tmp_path / "notes"
    result = tasks.slow.delay(str(notes), str(tmp_path / "never"))
    begun(notes)
    outbox.cancel(result.id, actor="user:ann", terminate=True)
    entry = settled(result)
    assert (entry.failures, entry.crashes, entry.releases) == (0, 0, 0)
    assert worker.alive


def test_terminate_leaves_a_thread_alone(start_worker: Start, tmp_path: Path) -> None:
    worker = start_worker("--pool=threads")
    notes, until = tmp_path / "notes", tmp_path / "until"
    result = tasks.slow.delay(str(notes), str(until))
    begun(notes)
    outbox.cancel(result.id, actor="user:ann", terminate=True)
    wait_until(lambda: "outbox.run.terminated" in worker.tail(50))
    until.touch()
    settled(result)
    assert worker.alive


def test_a_run_that_is_not_this_workers_is_not_killed(valkey: redis.Redis) -> None:
    from outbox.worker import control, identity

    entry = make_entry(State.RUNNING)
    victim = psutil.Popen(["sleep", "60"])
    try:
        runs.begin(run := Run(entry.pk, victim.pid, "default"))
        ours = {"entry_id": str(entry.pk), "owner": str(identity.BOOT), "pid": victim.pid}
        for wrong in ({"owner": str(entry.pk)}, {"pid": 1}, {"entry_id": str(identity.BOOT)}):
            assert "error" in control.terminate(None, **{**ours, **wrong})
        runs.end(run)
        assert "error" in control.terminate(None, **ours)  # it has ended meanwhile
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_a_broker_that_is_away_does_not_undo_the_cancellation(
    settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    entry = make_entry(State.RUNNING)
    conf = current_app.conf
    before = conf.broker_url
    conf.broker_url = conf.broker_write_url = "redis://127.0.0.1:1/0"
    try:
        assert outbox.cancel(entry.pk, actor="user:ann", terminate=True)
    finally:
        conf.broker_url, conf.broker_write_url = before, before
    assert reread(entry).status == State.CANCELLED
    assert "outbox.run.unreached" in caplog.text


# Many


def test_many_are_cancelled_at_once_and_what_has_ended_is_not_counted(valkey: redis.Redis) -> None:
    states = (State.PENDING, State.PUBLISHED, State.RUNNING, State.UNCERTAIN, State.SUCCEEDED)
    entries = [make_entry(state) for state in states]
    ids: list[Any] = [*(str(entry.pk) for entry in entries), entries[0].pk]
    assert outbox.cancel_many(ids, actor="user:ann", reason="recall") == 4
    after = [reread(entry).status for entry in entries]
    assert after == [State.CANCELLED] * 4 + [State.SUCCEEDED]


def test_many_are_cancelled_with_the_callers_transaction_or_not_at_all(valkey: redis.Redis) -> None:
    entries = [make_entry(State.PENDING) for _ in range(3)]
    with transaction.atomic():
        assert outbox.cancel_many((entry.pk for entry in entries), actor="user:ann") == 3
        transaction.set_rollback(True)
    assert {reread(entry).status for entry in entries} == {State.PENDING}


# Celery's own way


def test_celerys_revoke_cancels_the_entry_and_no_worker_remembers_it(
    start_worker: Start, tmp_path: Path
) -> None:
    worker = start_worker()
    notes, until = tmp_path / "notes", tmp_path / "until"
    result = tasks.slow.delay(str(notes), str(until))
    begun(notes)
    result.revoke()
    wait_until(lambda: entry_of(result).status == State.CANCELLED)
    cancelled = entry_of(result).events.get(verb="cancel")
    assert cancelled.actor == "celery:revoke"
    until.touch()
    settled(result)
    assert outbox.requeue(result.id, actor="user:ann")
    maintenance.dispatch(APP, using="default")
    wait_until(lambda: entry_of(result).status == State.SUCCEEDED)
    assert "Discarding revoked task" not in worker.tail(500)


def test_celerys_revoke_with_terminate_kills_its_child_and_stores_no_failure(
    start_worker: Start, tmp_path: Path
) -> None:
    worker = start_worker()
    notes, until = tmp_path / "notes", tmp_path / "until"
    result = tasks.slow.delay(str(notes), str(until))
    begun(notes)
    killed = entry_of(result).lease_pid
    before = children(worker)
    result.revoke(terminate=True)
    entry = settled(result)
    assert (entry.attempts, entry.crashes) == (1, 0)
    assert before - children(worker) == {killed}


def test_a_revoked_stamp_cancels_the_entries_that_bear_it(
    start_worker: Start, tmp_path: Path
) -> None:
    start_worker()
    signature = tasks.noted.si(str(tmp_path / "ran"))
    signature.stamp(order=["42"])
    result = signature.apply_async(countdown=600)
    other = tasks.noted.apply_async((str(tmp_path / "ran"),), countdown=600)
    APP.control.revoke_by_stamped_headers({"order": ["42"]})
    wait_until(lambda: entry_of(result).status == State.CANCELLED)
    assert entry_of(other).status == State.PENDING

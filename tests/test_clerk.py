"""The clerk: a live owner's lease holds however long its job is; a dead one's ends at once."""

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
from celery.result import AsyncResult
from django.db import connection, transaction
from django_celery_results.models import TaskResult

import outbox
from outbox import contact
from outbox.drill.processes import Process
from outbox.embedded import Servers
from outbox.lifecycle import lease
from outbox.models import OutboxEntry, OutboxTick, OutboxWorker
from outbox.states import WAITING, State
from outbox.worker.runs import Run, Runs
from tests import tasks
from tests.factories import PAST, at, make_entries, make_entry, reread
from tests.following import entry_of
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

POOLS = ["prefork", "threads", "solo", "gevent"]
Start = Callable[..., Process]


def renewals(entry_id: str) -> int:
    """A claim is version 2 after enqueue and publish; each renewal adds one."""
    return OutboxEntry.objects.get(pk=entry_id).version - 2


def long_job(folder: Path) -> tuple[AsyncResult, Path, Path]:
    """A job that notes its start in one file and goes on until the other is there."""
    notes, until = folder / "notes", folder / "until"
    return tasks.slow.delay(str(notes), str(until)), notes, until


@pytest.mark.parametrize("pool", POOLS)
def test_a_job_that_is_longer_than_its_lease_keeps_it(
    start_worker: Start, tmp_path: Path, pool: str
) -> None:
    start_worker(f"--pool={pool}")
    result, notes, until = long_job(tmp_path)
    wait_until(lambda: renewals(result.id) >= 5, timeout=30)  # a lease is three renewals long
    until.touch()
    entry = wait_until(lambda: entry_of(result) if entry_of(result).is_final else None)
    assert entry is not None
    assert (entry.status, entry.attempts, entry.crashes) == (State.SUCCEEDED, 1, 0)
    assert notes.read_text().count("start") == 1


def test_a_second_worker_takes_nothing_from_a_live_owner(
    start_worker: Start, tmp_path: Path
) -> None:
    start_worker()
    result, notes, until = long_job(tmp_path)
    wait_until(notes.exists)
    start_worker(name="second")
    wait_until(lambda: renewals(result.id) >= 5, timeout=30)
    until.touch()
    wait_until(lambda: entry_of(result).is_final)
    assert (entry_of(result).attempts, entry_of(result).crashes) == (1, 0)


def test_a_killed_child_is_a_crash_at_once_and_the_job_runs_again(
    start_worker: Start, tmp_path: Path
) -> None:
    start_worker()
    result, notes, until = long_job(tmp_path)
    wait_until(notes.exists)
    before = entry_of(result)
    assert before.lease_pid is not None
    os.kill(before.lease_pid, signal.SIGKILL)
    until.touch()
    wait_until(lambda: entry_of(result).is_final, timeout=30)
    entry = entry_of(result)
    assert (entry.status, entry.attempts, entry.crashes) == (State.SUCCEEDED, 2, 1)
    crash = entry.events.get(verb="crash")
    assert crash.actor == "clerk"
    assert before.lease_until is not None
    assert crash.at < before.lease_until  # seen, not waited for
    assert not TaskResult.objects.filter(task_id=result.id, status="FAILURE").exists()


def test_a_poison_pill_ends_at_its_cap_and_the_worker_goes_on(start_worker: Start) -> None:
    worker = start_worker()
    result = tasks.suicidal.delay()
    wait_until(lambda: entry_of(result).is_final, timeout=60)
    entry = entry_of(result)
    assert (entry.status, entry.attempts, entry.crashes, entry.failures) == ("failed", 3, 3, 0)
    assert "crash 3 of at most 3" in entry.error
    good = tasks.add.delay(1, 2)
    wait_until(lambda: entry_of(good).status == State.SUCCEEDED)
    assert worker.alive


def test_a_hard_time_limit_is_a_failure_and_never_also_a_crash(
    start_worker: Start, tmp_path: Path
) -> None:
    start_worker()
    result = tasks.limited.delay(str(tmp_path / "never"))
    wait_until(lambda: entry_of(result).is_final, timeout=60)
    entry = entry_of(result)
    assert (entry.status, entry.attempts, entry.failures, entry.crashes) == ("failed", 2, 2, 0)
    assert entry.error == "TimeLimitExceeded: 1 seconds"
    assert list(entry.events.values_list("verb", flat=True)) == ["timeout", "timeout"]


def test_a_copy_that_dies_beside_the_original_does_not_crash_it(
    start_worker: Start, tmp_path: Path
) -> None:
    worker = start_worker()
    result, notes, until = long_job(tmp_path)
    wait_until(notes.exists)
    owner = entry_of(result).lease_pid
    for child in psutil.Process(worker.pid).children():
        if child.pid != owner:
            child.kill()
    wait_until(lambda: renewals(result.id) >= 3, timeout=30)
    until.touch()
    wait_until(lambda: entry_of(result).is_final)
    assert (entry_of(result).attempts, entry_of(result).crashes) == (1, 0)


def test_a_worker_alone_dispatches_and_sweeps_when_nobody_else_does(start_worker: Start) -> None:
    waiting = make_entry(State.PENDING)
    lapsed = make_entry(State.RUNNING, lease_until=at(PAST), args=[3, 4])
    start_worker()
    wait_until(lambda: reread(waiting).is_final and reread(lapsed).is_final, timeout=30)
    assert reread(lapsed).crashes == 1
    assert OutboxTick.objects.get(name="dispatch").last_at is not None
    wait_until(lambda: OutboxTick.objects.filter(name="reconcile", last_at__isnull=False).exists())


def test_a_worker_alone_publishes_a_backlog_of_several_batches(start_worker: Start) -> None:
    make_entries(1200, State.PENDING)
    start_worker()
    left = OutboxEntry.objects.exclude(status=State.SUCCEEDED)
    wait_until(lambda: not left.exists(), timeout=60)


def test_a_database_that_is_away_keeps_no_other_from_its_ticks_and_leases(
    start_worker: Start, settings: Any, tmp_path: Path
) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "DATABASES": ["gone", "default"]}
    waiting = make_entry(State.PENDING)
    start_worker(TESTS_DATABASES="gone,default")
    wait_until(lambda: reread(waiting).is_final, timeout=30)
    notes, until = tmp_path / "notes", tmp_path / "until"
    result = tasks.slow.apply_async((str(notes), str(until)), using="default")
    wait_until(lambda: renewals(result.id) >= 4, timeout=30)
    until.touch()
    wait_until(lambda: entry_of(result).is_final)
    assert (entry_of(result).attempts, entry_of(result).crashes) == (1, 0)


def test_a_worker_says_that_it_is_alive_and_when_it_has_stopped(start_worker: Start) -> None:
    worker = start_worker()
    row = wait_until(lambda: OutboxWorker.objects.first())
    assert row is not None
    assert (row.pid, row.pool, row.queues) == (worker.pid, "prefork", ["celery"])
    worker.stop()
    row.refresh_from_db()
    assert row.stopped_at is not None


def test_the_clerk_outlives_a_database_that_restarts(
    start_worker: Start, servers: Servers, tmp_path: Path
) -> None:
    start_worker()
    result, _notes, until = long_job(tmp_path)
    wait_until(lambda: renewals(result.id) >= 1)
    connection.close()
    servers.postgres.stop()
    servers.postgres.start()
    seen = renewals(result.id)
    wait_until(lambda: renewals(result.id) >= seen + 4, timeout=30)
    until.touch()
    wait_until(lambda: entry_of(result).is_final)
    assert (entry_of(result).attempts, entry_of(result).crashes) == (1, 0)


def test_a_cold_shutdown_releases_what_its_children_held_and_burns_nothing(
    start_worker: Start, tmp_path: Path
) -> None:
    worker = start_worker()
    result, notes, _until = long_job(tmp_path)
    wait_until(notes.exists)
    worker.signal(signal.SIGQUIT)
    worker.wait(30)
    entry = entry_of(result)
    assert entry.status in WAITING
    assert (entry.releases, entry.crashes, entry.failures) == (1, 0, 0)


def test_a_cancelled_run_whose_child_dies_is_settled_and_stays_cancelled(
    start_worker: Start, tmp_path: Path
) -> None:
    start_worker()
    result, notes, _until = long_job(tmp_path)
    wait_until(notes.exists)
    outbox.cancel(result.id, actor="user:ann")
    pid = entry_of(result).lease_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not entry_of(result).run_goes_on)
    assert entry_of(result).status == State.CANCELLED
    assert outbox.requeue(result.id, actor="user:ann")


def test_a_row_that_somebody_locks_for_longer_than_a_lease_costs_no_run_its_lease(
    start_worker: Start, tmp_path: Path
) -> None:
    """Neither that one, whose owner lives and holds it, nor the others of its worker."""
    start_worker()
    locked, notes, until = long_job(tmp_path)
    other, *_ = long_job(tmp_path)
    wait_until(lambda: notes.exists() and notes.read_text().count("start") == 2)
    with transaction.atomic():
        row = OutboxEntry.objects.select_for_update().get(pk=locked.id)
        wait_until(lambda: OutboxEntry.objects.lapsed().filter(pk=row.pk).exists(), timeout=30)
        wait_until(lambda: renewals(other.id) >= 4, timeout=30)
    assert lease.crash_lapsed(using="default") == 0
    until.touch()
    for result in (locked, other):
        wait_until(lambda result=result: entry_of(result).is_final, timeout=30)  # type: ignore[misc]
        assert (entry_of(result).attempts, entry_of(result).crashes) == (1, 0)


def test_a_lapsed_run_is_spared_only_for_an_owner_that_lives_and_holds_it() -> None:
    def lapsed(**owner: Any) -> OutboxEntry:
        entry = make_entry(State.RUNNING, lease_until=at(PAST))
        known = {"id": entry.lease_owner, "holds": [str(entry.pk)], **owner}
        OutboxWorker(**known).save(force_insert=True)
        return entry

    spared = lapsed()
    crashed = [
        lapsed(heartbeat_at=at(PAST)),
        lapsed(stopped_at=at()),
        lapsed(holds=[]),
        lapsed(id=uuid4()),  # another worker's prefetched copy
    ]
    assert lease.crash_lapsed(using="default") == 4
    assert reread(spared).status == State.RUNNING
    assert {reread(entry).crashes for entry in crashed} == {1}


def test_the_lease_of_a_greenlet_outlasts_a_busy_one(start_worker: Start, tmp_path: Path) -> None:
    start_worker("--pool=gevent")
    result, notes, until = long_job(tmp_path)
    wait_until(notes.exists)
    entry = entry_of(result)
    assert entry.lease_until is not None
    assert entry.started_at is not None
    assert (entry.lease_until - entry.started_at).total_seconds() == 30  # configured are 2
    wait_until(lambda: renewals(result.id) >= 2)
    held = entry_of(result).lease_until
    assert held is not None
    assert held > entry.lease_until
    until.touch()
    wait_until(lambda: entry_of(result).is_final)


def test_a_terminated_child_is_a_crash_and_no_failure_in_the_result_store(
    start_worker: Start, tmp_path: Path
) -> None:
    start_worker()
    result, notes, until = long_job(tmp_path)
    wait_until(notes.exists)
    pid = entry_of(result).lease_pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    until.touch()
    wait_until(lambda: entry_of(result).is_final, timeout=30)
    entry = entry_of(result)
    assert (entry.status, entry.attempts, entry.crashes) == (State.SUCCEEDED, 2, 1)
    assert not TaskResult.objects.filter(task_id=result.id, status="FAILURE").exists()


def test_a_dead_run_whose_row_is_locked_costs_the_others_no_lease(
    start_worker: Start, tmp_path: Path
) -> None:
    start_worker()
    dead, notes, until = long_job(tmp_path)
    other, *_ = long_job(tmp_path)
    wait_until(lambda: notes.exists() and notes.read_text().count("start") == 2)
    with transaction.atomic():
        row = OutboxEntry.objects.select_for_update().get(pk=dead.id)
        assert row.lease_pid is not None
        os.kill(row.lease_pid, signal.SIGKILL)
        seen = renewals(other.id)
        wait_until(lambda: renewals(other.id) >= seen + 5, timeout=30)  # longer than a lease
    until.touch()
    for result in (dead, other):
        wait_until(lambda result=result: entry_of(result).is_final, timeout=30)  # type: ignore[misc]
    assert (entry_of(dead).attempts, entry_of(dead).crashes) == (2, 1)
    assert (entry_of(other).attempts, entry_of(other).crashes) == (1, 0)


def test_after_a_gap_in_which_nobody_had_the_database_a_whole_lease_is_waited() -> None:
    lapsed = make_entry(State.RUNNING, lease_until=at(PAST))
    contact.leave_word(using="default")
    tick = OutboxTick.objects.filter(name="contact")
    tick.update(last_at=at(timedelta(seconds=-0.5)), unbroken_since=at(PAST))
    assert contact.unbroken_for(using="default") > 50
    tick.update(last_at=at(timedelta(seconds=-1.5)), unbroken_since=at(PAST))  # a lease is 2
    assert lease.sweep(using="default").get("crashed") is None
    assert reread(lapsed).status == State.RUNNING
    assert contact.unbroken_for(using="default") < 1
    tick.update(unbroken_since=at(timedelta(seconds=-2)))
    assert lease.sweep(using="default")["crashed"] == 1


def test_two_deliveries_of_an_entry_in_one_process_are_two_runs() -> None:
    entry_id = uuid4()
    register = Runs()
    original, copy = (Run(entry_id, 1, "default") for _ in range(2))
    register.begin(original)
    register.begin(copy)
    register.end(copy)
    assert register.alive() == [original]

"""A real SIGKILL in each window in which a death must not lose, repeat or forge an entry."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import redis
from django.contrib.auth.models import Group
from django.db import connection, transaction

import outbox
from outbox import maintenance
from outbox.drill.processes import Process
from outbox.embedded import Servers
from outbox.failpoints import VARIABLE, Failpoint
from outbox.lifecycle import finish
from outbox.lifecycle.claim import Claim
from outbox.models import OutboxEffect, OutboxEntry
from outbox.states import State
from tests import tasks
from tests.factories import AHEAD, PAST, at, begin_effect, make_entry, reread
from tests.waiting import runs, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

APP = tasks.add.app
Start = Callable[..., Process]


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "reached"


@pytest.fixture
def start(surroundings: dict[str, str], valkey: redis.Redis, tmp_path: Path) -> Iterator[Start]:
    """Start a process on the test's database and broker."""
    with ExitStack() as stack:

        def begin(*argv: str, **env: str) -> Process:
            process = Process(
                argv[1],
                argv=[sys.executable, *argv],
                log=tmp_path / "process.log",
                env={**surroundings, **env},
            )
            return stack.enter_context(process)

        yield begin


def armed(point: Failpoint, marker: Path) -> dict[str, str]:
    return {VARIABLE: f"{point}={marker}"}


def kill_at(marker: Path, process: Process) -> None:
    """Wait until a process of the group stands at the point, and kill the whole group."""
    pid = int(process.wait_for(lambda: _pid_in(marker), timeout=30, what="its stop point") or 0)
    process.kill()
    wait_until(lambda: not runs(pid))
    assert process.returncode == -signal.SIGKILL


def _pid_in(marker: Path) -> str | None:
    return (marker.exists() and marker.read_text()) or None


def dispatched_until(entry_id: Any, status: State = State.SUCCEEDED) -> OutboxEntry:
    def look() -> OutboxEntry | None:
        maintenance.dispatch(APP, using="default")
        return OutboxEntry.objects.filter(pk=entry_id, status=status).first()

    found = wait_until(look, timeout=30)
    assert found is not None
    return found


def test_killed_before_the_commit_there_is_neither_row_nor_entry(
    start: Start, marker: Path, valkey: redis.Redis, tmp_path: Path
) -> None:
    producer = start(
        "-m", "tests.producer", "order", str(tmp_path / "ran"), **armed(Failpoint.ENQUEUED, marker)
    )
    kill_at(marker, producer)
    wait_until(lambda: not _open_transactions())
    assert not Group.objects.exists()
    assert not OutboxEntry.objects.exists()
    assert valkey.llen("celery") == 0


def _open_transactions() -> bool:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid() AND state LIKE 'idle in transaction%%')"
        )
        return bool(cursor.fetchone()[0])


def test_killed_between_commit_and_publish_the_dispatcher_finds_the_entry(
    start: Start, start_worker: Start, marker: Path, tmp_path: Path
) -> None:
    path = tmp_path / "ran"
    producer = start(
        "-m", "tests.producer", "order", str(path), **armed(Failpoint.COMMITTED, marker)
    )
    kill_at(marker, producer)
    entry = OutboxEntry.objects.get()
    assert (entry.status, Group.objects.count()) == (State.PENDING, 1)
    start_worker()
    dispatched_until(entry.pk)
    assert path.read_text() == f"{entry.pk} 0 ran\n"


def test_killed_between_publish_and_mark_the_message_repeats_and_runs_once(
    start: Start,
    start_worker: Start,
    marker: Path,
    valkey: redis.Redis,
    tmp_path: Path,
) -> None:
    path = tmp_path / "ran"
    entry = make_entry(State.PENDING, task="tests.tasks.noted", args=[str(path)])
    dispatcher = start(
        "manage.py", "outbox_dispatcher", "--once", **armed(Failpoint.FLUSHED, marker)
    )
    kill_at(marker, dispatcher)
    wait_until(lambda: not _open_transactions())
    assert reread(entry).status == State.PENDING
    assert maintenance.dispatch(APP, using="default")["published"] == 1
    assert valkey.llen("celery") == 2
    start_worker()
    wait_until(lambda: valkey.llen("celery") == 0 and not valkey.hlen("unacked"))
    after = reread(entry)
    assert (after.status, after.attempts) == (State.SUCCEEDED, 1)
    assert path.read_text() == f"{entry.pk} 0 ran\n"


def test_killed_between_an_on_commit_publish_and_its_mark_the_message_is_claimed_all_the_same(
    start: Start, start_worker: Start, marker: Path, valkey: redis.Redis, tmp_path: Path
) -> None:
    path = tmp_path / "ran"
    producer = start("-m", "tests.producer", "order", str(path), **armed(Failpoint.FLUSHED, marker))
    kill_at(marker, producer)
    entry = OutboxEntry.objects.get()
    assert (entry.status, entry.publishes, valkey.llen("celery")) == (State.PENDING, 0, 1)
    start_worker()
    entry = dispatched_until(entry.pk)
    assert (entry.attempts, entry.crashes) == (1, 0)
    assert path.read_text() == f"{entry.pk} 0 ran\n"


def test_killed_before_the_claim_the_entry_is_published_again_and_no_attempt_is_counted(
    start_worker: Start, marker: Path, tmp_path: Path
) -> None:
    path = tmp_path / "ran"
    first = start_worker(**armed(Failpoint.DELIVERED, marker))
    result = tasks.noted.delay(str(path))
    kill_at(marker, first)
    entry = OutboxEntry.objects.get(pk=result.id)
    assert (entry.status, entry.attempts) == (State.PUBLISHED, 0)
    start_worker(name="second")
    entry = dispatched_until(result.id)
    assert (entry.attempts, entry.crashes, entry.strands) == (1, 0, 1)
    assert path.read_text() == f"{entry.pk} 0 ran\n"


def test_killed_between_claim_and_body_another_worker_runs_it_once(
    start_worker: Start, marker: Path, tmp_path: Path
) -> None:
    path = tmp_path / "ran"
    first = start_worker(**armed(Failpoint.CLAIMED, marker))
    result = tasks.noted.delay(str(path))
    kill_at(marker, first)
    assert OutboxEntry.objects.get(pk=result.id).status == State.RUNNING
    start_worker(name="second")
    entry = dispatched_until(result.id)
    assert (entry.attempts, entry.crashes, entry.failures) == (2, 1, 0)
    assert path.read_text() == f"{entry.pk} 0 ran\n"
    assert entry.events.get().verb == "crash"


def test_killed_between_body_and_ending_the_body_runs_again_under_the_same_id(
    start_worker: Start, marker: Path, tmp_path: Path
) -> None:
    path = tmp_path / "ran"
    first = start_worker(**armed(Failpoint.RETURNED, marker))
    result = tasks.noted.delay(str(path))
    kill_at(marker, first)
    start_worker(name="second")
    entry = dispatched_until(result.id)
    assert (entry.attempts, entry.crashes) == (2, 1)
    assert path.read_text() == f"{entry.pk} 0 ran\n" * 2


def test_killed_between_body_and_ending_an_atomic_effect_happens_once(
    start_worker: Start, marker: Path
) -> None:
    first = start_worker(**armed(Failpoint.RETURNED, marker))
    result = tasks.group_made.delay("once")
    kill_at(marker, first)
    start_worker(name="second")
    entry = dispatched_until(result.id)
    assert (entry.attempts, entry.crashes) == (2, 1)
    assert Group.objects.count() == 1


def test_killed_for_the_last_time_its_errbacks_are_owed_by_whoever_finds_it(
    start_worker: Start, marker: Path, tmp_path: Path
) -> None:
    path = tmp_path / "ran"
    first = start_worker(**armed(Failpoint.CLAIMED, marker))
    errback = tasks.hearing_of.s(str(path))
    with transaction.atomic():
        result = tasks.noted.apply_async((str(path),), link_error=errback)
        OutboxEntry.objects.filter(pk=result.id).update(crash_limit=1)
    kill_at(marker, first)
    start_worker(name="second")
    entry = dispatched_until(result.id, State.FAILED)
    assert (entry.attempts, entry.crashes) == (1, 1)
    dispatched_until(_owed_after(entry, "outbox.follow").pk)
    dispatched_until(_owed_after(entry, "tests.tasks.hearing_of").pk)
    assert path.read_text() == f"{entry.pk} owed\n"


def test_killed_in_an_errback_what_that_wrote_happens_once(
    start_worker: Start, marker: Path
) -> None:
    first = start_worker("-c", "1", **armed(Failpoint.RETURNED, marker))
    result = tasks.looking_at_errbacks.apply_async(link_error=tasks.hearing_once.s())
    entry = dispatched_until(result.id, State.FAILED)
    following = _owed_after(entry, "outbox.follow")
    maintenance.dispatch(APP, using="default")
    kill_at(marker, first)
    assert reread(following).status == State.RUNNING
    start_worker(name="second")
    after = dispatched_until(following.pk)
    assert (after.attempts, after.crashes) == (2, 1)
    assert [group.name for group in Group.objects.all()] == ["1"]


def _owed_after(entry: OutboxEntry, task: str) -> OutboxEntry:
    return OutboxEntry.objects.get(parent_id=entry.pk, task=task)


IN_AN_EFFECT = [(Failpoint.BEGUN, 0), (Failpoint.PERFORMED, 1)]


@pytest.mark.parametrize(("point", "lines"), IN_AN_EFFECT)
def test_killed_in_an_effect_that_nobody_can_be_asked_about_a_person_decides(
    start_worker: Start, marker: Path, tmp_path: Path, point: Failpoint, lines: int
) -> None:
    path = tmp_path / "lines"
    path.touch()
    first = start_worker(**armed(point, marker))
    result = tasks.writing.delay(str(path))
    kill_at(marker, first)
    start_worker(name="second")
    dispatched_until(result.id, State.UNCERTAIN)
    assert len(path.read_text().splitlines()) == lines
    assert outbox.resolve(result.id, effect="line", happened=bool(lines), actor="alice")
    entry = dispatched_until(result.id)
    assert (entry.attempts, entry.crashes) == (3, 1)
    assert path.read_text() == f"{entry.pk}:line\n"


@pytest.mark.parametrize(("point", "lines"), IN_AN_EFFECT)
def test_killed_in_an_effect_that_can_be_verified_it_happens_once(
    start_worker: Start, marker: Path, tmp_path: Path, point: Failpoint, lines: int
) -> None:
    path = tmp_path / "lines"
    first = start_worker(**armed(point, marker))
    result = tasks.writing_verified.delay(str(path))
    kill_at(marker, first)
    assert path.exists() == bool(lines)
    start_worker(name="second")
    entry = dispatched_until(result.id)
    assert (entry.attempts, entry.crashes) == (2, 1)
    assert path.read_text() == f"{entry.pk}:line\n"
    assert entry.result == {"key": f"{entry.pk}:line"}


def test_a_worker_outlives_an_effect_that_may_still_be_under_way(
    start_worker: Start, tmp_path: Path
) -> None:
    path = tmp_path / "lines"
    entry = make_entry(task="tests.tasks.writing_verified", args=[str(path)])
    begin_effect(entry, "line", performer_until=at(AHEAD))
    worker = start_worker()
    maintenance.dispatch(APP, using="default")
    wait_until(lambda: reread(entry).releases == 1)
    waits = reread(entry)
    assert (waits.status, waits.attempts) == (State.PENDING, 1)
    assert not path.exists()
    OutboxEffect.objects.update(performer_until=at(PAST))
    OutboxEntry.objects.filter(pk=entry.pk).update(available_at=at(PAST))
    assert dispatched_until(entry.pk).attempts == 2
    assert worker.alive


@pytest.mark.parametrize(("point", "lines"), IN_AN_EFFECT)
def test_killed_in_an_effect_that_may_be_repeated_it_is_under_the_same_key(
    start_worker: Start, marker: Path, tmp_path: Path, point: Failpoint, lines: int
) -> None:
    path = tmp_path / "lines"
    first = start_worker(**armed(point, marker))
    result = tasks.writing.delay(str(path), on_uncertain="repeat")
    kill_at(marker, first)
    start_worker(name="second")
    entry = dispatched_until(result.id)
    assert path.read_text() == f"{entry.pk}:line\n" * (lines + 1)


def test_an_atomic_run_whose_database_dies_at_the_commit_is_released_and_runs_again(
    start_worker: Start, servers: Servers, marker: Path
) -> None:
    worker = start_worker("-c", "1", **armed(Failpoint.RETURNED, marker))
    result = tasks.group_made.delay("once")
    worker.wait_for(lambda: _pid_in(marker), timeout=30, what="its stop point")
    connection.close()
    servers.postgres.stop()
    servers.postgres.start()
    marker.unlink()  # it goes on, to complete over a connection that is gone
    wait_until(lambda: OutboxEntry.objects.get(pk=result.id).releases)
    maintenance.dispatch(APP, using="default")
    worker.wait_for(lambda: _pid_in(marker), timeout=30, what="its second run")
    marker.unlink()
    entry = dispatched_until(result.id)
    assert (entry.attempts, entry.releases, entry.failures, entry.crashes) == (2, 1, 0, 0)
    assert Group.objects.count() == 1


def test_an_atomic_body_that_raises_while_the_database_is_away_is_retried_by_its_own_rules(
    start_worker: Start, servers: Servers, tmp_path: Path
) -> None:
    worker = start_worker("-c", "1")
    path, until = tmp_path / "ran", tmp_path / "until"
    result = tasks.failing_atomically.delay(str(path), str(until))
    wait_until(lambda: path.exists() and path.read_text(), timeout=30)
    connection.close()
    servers.postgres.stop()
    until.touch()
    words = "outbox.database.away while recording"
    worker.wait_for(lambda: words in worker.tail(200), timeout=30, what="its end was due")
    servers.postgres.start()
    entry = dispatched_until(result.id)
    assert (entry.attempts, entry.failures, entry.crashes, entry.releases) == (2, 1, 0, 0)
    assert Group.objects.count() == 1


@pytest.mark.parametrize("statement", ["SET search_path TO nowhere", "SET ROLE pg_monitor"])
def test_what_a_body_did_to_its_connection_fails_neither_its_end_nor_the_next_claim(
    start_worker: Start, statement: str
) -> None:
    worker = start_worker("-c", "1")
    dispatched_until(tasks.poisoning.delay(statement).id)
    results = [tasks.add.delay(number, number) for number in range(5)]
    entries = [dispatched_until(result.id) for result in results]
    assert [entry.attempts for entry in entries] == [1] * 5
    assert "outbox.claim.failed" not in worker.tail(1000)


def test_a_claim_that_a_killed_database_forgot_is_found_and_its_run_writes_nothing(
    start_worker: Start, servers: Servers, marker: Path
) -> None:
    """Claims are not synced: the run may happen twice, be counted once, and write once."""
    worker = start_worker("-c", "1", **armed(Failpoint.RETURNED, marker))
    result = tasks.group_made.delay("once")
    worker.wait_for(lambda: _pid_in(marker), timeout=30, what="its stop point")
    connection.close()
    servers.postgres.kill()
    servers.postgres.start()
    marker.unlink()
    wait_until(lambda: marker.exists() or _recovered(result.id), timeout=30)
    worker.wait_for(lambda: _pid_in(marker), timeout=30, what="its second run")
    marker.unlink()
    entry = dispatched_until(result.id)
    assert entry.attempts in (1, 2)  # 2 where the server had written the claim before it died
    assert Group.objects.count() == 1


def _recovered(entry_id: Any) -> bool:
    maintenance.reconcile(APP, using="default")
    maintenance.dispatch(APP, using="default")
    return False


def test_a_claim_waits_for_a_database_that_is_away(
    start_worker: Start, servers: Servers, valkey: redis.Redis, tmp_path: Path
) -> None:
    path = tmp_path / "ran"
    entry = make_entry(State.PUBLISHED, task="tests.tasks.noted", args=[str(path)])
    worker = start_worker()
    connection.close()
    servers.postgres.kill()
    try:
        _deliver(entry)
        worker.wait_for(
            lambda: "outbox.database.away" in worker.tail(500), timeout=30, what="the outage noted"
        )
        assert valkey.hlen("unacked") >= 1
    finally:
        servers.postgres.start()
    wait_until(lambda: reread(entry).is_final, timeout=30)
    assert path.read_text() == f"{entry.pk} 0 ran\n"
    assert reread(entry).status == State.SUCCEEDED


def test_a_reconcile_killed_between_look_and_repair_is_followed_by_one_that_repairs_once(
    start: Start, marker: Path, valkey: redis.Redis
) -> None:
    entry = make_entry(State.PUBLISHED, published_at=at(PAST), missing_since=at(PAST))
    reconciler = start("manage.py", "outbox_reconcile", **armed(Failpoint.FOUND, marker))
    kill_at(marker, reconciler)
    assert reread(entry).version == entry.version
    found = wait_until(lambda: maintenance.reconcile(APP, using="default", anew=True))
    assert found is not None
    assert found["stranded"] == 1
    after = reread(entry)
    assert (after.status, after.strands, after.attempts) == (State.PENDING, 1, 0)


def _deliver(entry: OutboxEntry) -> None:
    """A plain hint, put into the queue without the database."""
    message = APP.amqp.as_task_v2(str(entry.pk), entry.task)
    with APP.producer_or_acquire() as producer:
        APP.amqp.send_task_message(producer, entry.task, message)


def test_an_ending_waits_for_a_database_that_only_reads(
    start_worker: Start, tmp_path: Path
) -> None:
    """As after a failover to a standby that has not been promoted yet."""
    notes, until = tmp_path / "notes", tmp_path / "until"
    worker = start_worker()
    result = tasks.slow.delay(str(notes), str(until))
    wait_until(notes.exists)
    _set_read_only(on=True)
    try:
        until.touch()
        worker.wait_for(
            lambda: "outbox.database.away" in worker.tail(500), timeout=30, what="the outage noted"
        )
    finally:
        _set_read_only(on=False)
    entry = dispatched_until(result.id)
    assert (entry.attempts, entry.crashes) == (1, 0)
    assert notes.read_text().count("start") == 1


def _set_read_only(*, on: bool) -> None:
    """For the sessions of the test's database; those that are open are cut."""
    with connection.cursor() as cursor:
        name = connection.settings_dict["NAME"]
        cursor.execute("SET default_transaction_read_only = off")
        cursor.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = {on}")
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


def test_killed_with_jobs_prefetched_none_waits_for_the_visibility_timeout(
    start_worker: Start, valkey: redis.Redis, tmp_path: Path
) -> None:
    notes, until = tmp_path / "notes", tmp_path / "until"
    first = start_worker()
    results = [tasks.slow.delay(str(notes), str(until)) for _ in range(6)]
    wait_until(lambda: notes.exists() and notes.read_text().count("start") == 2)
    wait_until(lambda: valkey.hlen("unacked") == 6)
    first.kill()
    until.touch()
    start_worker(name="second")
    ids = [result.id for result in results]
    ended = OutboxEntry.objects.filter(pk__in=ids, status=State.SUCCEEDED)
    wait_until(lambda: ended.count() == 6, timeout=60)
    assert sum(entry.crashes for entry in ended) == 2
    assert sum(entry.strands for entry in ended) == 4


def test_a_run_that_lost_its_lease_writes_nothing(start_worker: Start, tmp_path: Path) -> None:
    """The late worker is stopped past its lease, another takes over, and it wakes up."""
    notes, until = tmp_path / "notes", tmp_path / "until"
    first = start_worker()
    result = tasks.slow.delay(str(notes), str(until))
    wait_until(notes.exists)
    os.killpg(first.pid, signal.SIGSTOP)
    start_worker(name="second")
    wait_until(lambda: _dispatch_and_count(notes) == 2, timeout=30)
    until.touch()
    entry = dispatched_until(result.id)
    os.killpg(first.pid, signal.SIGCONT)
    wait_until(lambda: entry.events.filter(verb="late").exists())
    after = reread(entry)
    assert (after.version, after.status, after.attempts) == (entry.version, "succeeded", 2)


def _dispatch_and_count(notes: Path) -> int:
    maintenance.dispatch(APP, using="default")
    return notes.read_text().count("start")


def test_a_transaction_that_never_commits_publishes_nothing(valkey: redis.Redis) -> None:
    with transaction.atomic():
        tasks.add.delay(1, 2)
        assert valkey.llen("celery") == 0
        transaction.set_rollback(True)
    assert valkey.llen("celery") == 0


def test_a_commit_that_is_cut_each_time_is_tried_later_each_time() -> None:
    """Of a body that is longer than what a pooler allows: no failure, and no loop at full speed."""

    def pause(attempts: int, *, again: bool) -> float:
        entry = make_entry(State.RUNNING, attempts=attempts)
        finish.release(_claim_of(entry), reason="cut", again=again)
        after = reread(entry)
        return (after.available_at - after.events.get().at).total_seconds()

    assert pause(1, again=True) <= 0
    assert max(pause(7, again=True) for _ in range(20)) > 5
    assert pause(7, again=False) <= 0  # at a shutdown it is due at once


def _claim_of(entry: OutboxEntry) -> Claim:
    assert entry.claim_token is not None
    names = {field.name for field in fields(Claim)} - {"token", "using"}
    columns = {name: getattr(entry, name) for name in names}
    return Claim(**columns, token=entry.claim_token, using="default")

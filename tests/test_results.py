"""The result store against the entries: what `AsyncResult` says is what the entry has reached."""

from __future__ import annotations

import sys
import threading
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from celery.backends.base import DisabledBackend
from celery.exceptions import TaskRevokedError, TimeLimitExceeded
from celery.result import AsyncResult
from django.db import connection
from django_celery_results.models import TaskResult

import outbox
from outbox import ticks, transitions
from outbox.drill.processes import Process
from outbox.errors import EntryFailed
from outbox.events import Note
from outbox.lifecycle.reconcile import Findings, reconcile, result_store, results
from outbox.models import OutboxEntry
from outbox.states import FINAL, State
from tests import tasks
from tests.factories import AHEAD, ago, at, begin_effect, make_entries, make_entry, reread
from tests.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]

APP = tasks.add.app


def lately() -> datetime:
    """Since the last pass, and past the moment that is left to the worker."""
    return ago(seconds=30)


def look(**how: Any) -> Findings:
    return reconcile(APP, using="default", **how)


def told(entry: OutboxEntry) -> AsyncResult:
    """What Celery says of it, read anew."""
    result = AsyncResult(str(entry.pk), app=APP)
    APP.backend._cache.clear()
    return result


def store(
    entry: OutboxEntry, status: str, value: Any = None, *, at: datetime | None = None
) -> None:
    """As a worker stored it, a while ago."""
    APP.backend.store_result(str(entry.pk), value, status)
    TaskResult.objects.filter(task_id=str(entry.pk)).update(date_done=at or lately())


def ended(state: State, **columns: Any) -> OutboxEntry:
    return make_entry(state, **{"finished_at": lately(), **columns})


# --- entries that have ended --------------------------------------------------------------------


def test_a_success_of_which_nothing_is_stored_is_told_with_its_result() -> None:
    entry = ended(State.SUCCEEDED, result={"id": uuid4(), "sum": 3})
    assert look().mismatched == 1
    assert told(entry).get(timeout=1) == entry.result
    assert look().mismatched == 0


def test_a_failure_is_told_as_the_error_that_the_body_raised() -> None:
    traceback = "Traceback …\ntests.tasks.Passing: attempt 3\n"
    ours = ended(State.FAILED, error="Passing: attempt 3", traceback=traceback)
    plain = ended(State.FAILED, error="ValueError: no")
    assert look().mismatched == 2
    with pytest.raises(tasks.Passing, match="attempt 3"):
        told(ours).get(timeout=1)
    assert told(ours).traceback == traceback
    with pytest.raises(ValueError, match="no"):
        told(plain).get(timeout=1)


def test_an_error_of_a_class_that_is_nowhere_to_be_found_is_told_by_its_name() -> None:
    entry = ended(State.FAILED, error="Odd: words\nof two lines")
    look()
    with pytest.raises(Exception, match="words\nof two lines") as raised:
        told(entry).get(timeout=1)
    assert type(raised.value).__name__ == "Odd"


def due(entry: OutboxEntry) -> None:
    transitions.expire(entry, note=Note("sweep", "it expired at noon before it started"))


def crashed(entry: OutboxEntry) -> None:
    note = Note("sweep", "its lease ran out")
    transitions.crash(entry, delay=timedelta(), limit=1, on_crash="retry", note=note)


def timed_out(entry: OutboxEntry) -> None:
    note = Note("clerk", error="TimeLimitExceeded: 1 seconds")
    holder = transitions.Holder(owner=entry.lease_owner, pid=entry.lease_pid)
    end: dict[str, Any] = {"delay": timedelta(), "budget": 1, "note": note, "using": "default"}
    transitions.time_out(entry.pk, holder=holder, **end)


def rejected(entry: OutboxEntry) -> None:
    transitions.reject(entry, note=Note("dispatcher", "it cannot be rendered as a message"))


@pytest.mark.parametrize(
    ("state", "end", "error"),
    [
        (State.PENDING, due, EntryFailed),
        (State.RUNNING, crashed, EntryFailed),
        (State.RUNNING, timed_out, TimeLimitExceeded),
        (State.PENDING, rejected, EntryFailed),
    ],
)
def test_every_end_without_a_run_that_raised_is_told_as_a_failure(
    monkeypatch: pytest.MonkeyPatch, state: State, end: Any, error: type[Exception]
) -> None:
    monkeypatch.setattr(results, "MOMENT", timedelta())
    entry = make_entry(state)
    end(entry)
    assert reread(entry).status == State.FAILED
    look()
    assert told(entry).state == "FAILURE"
    with pytest.raises(error):
        told(entry).get(timeout=1)


@pytest.mark.parametrize("state", [State.PENDING, State.PUBLISHED, State.RUNNING])
def test_a_cancellation_is_told_as_revoked_also_before_any_run(
    monkeypatch: pytest.MonkeyPatch, state: State
) -> None:
    monkeypatch.setattr(results, "MOMENT", timedelta())
    entry = make_entry(state)
    outbox.cancel(entry.pk, actor="user:ann")
    look()
    assert told(entry).state == "REVOKED"
    with pytest.raises(TaskRevokedError):
        told(entry).get(timeout=1)


def test_a_persons_word_that_it_happened_is_told_with_its_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(results, "MOMENT", timedelta())
    entry = make_entry(State.UNCERTAIN)
    store(entry, "FAILURE", ValueError("no"))
    outbox.resolve(entry.pk, happened=True, result=7, actor="user:ann")
    look()
    assert told(entry).get(timeout=1) == 7


@pytest.mark.parametrize("state", sorted(FINAL))
@pytest.mark.parametrize("stored", ["PENDING", "STARTED", "RETRY", "FAILURE", "SUCCESS", "REVOKED"])
def test_whatever_is_stored_of_an_ended_entry_comes_to_say_what_it_reached(
    state: State, stored: str
) -> None:
    entry = ended(state)
    store(entry, stored, ValueError("old") if stored in ("RETRY", "FAILURE", "REVOKED") else None)
    says = {"succeeded": "SUCCESS", "failed": "FAILURE", "cancelled": "REVOKED"}[state]
    assert look().mismatched == (stored != says)
    assert told(entry).state == says


def test_what_celery_kept_of_the_call_is_kept() -> None:
    entry = ended(State.SUCCEEDED)
    store(entry, "FAILURE", ValueError("old"))
    TaskResult.objects.update(task_name=entry.task, worker="w@host")
    look()
    row = TaskResult.objects.get()
    assert (row.task_name, row.worker, row.status) == (entry.task, "w@host", "SUCCESS")


# --- entries that are open ----------------------------------------------------------------------


def test_a_requeued_entry_is_told_as_pending_again() -> None:
    entry = make_entry(State.FAILED, finished_at=ago(hours=5), created_at=ago(hours=6))
    store(entry, "FAILURE", ValueError("no"), at=ago(hours=5))
    outbox.requeue(entry.pk, actor="user:ann")
    OutboxEntry.objects.update(due_at=lately(), started_at=ago(hours=5))
    assert look().mismatched == 1
    assert told(entry).state == "PENDING"


def test_an_entry_that_was_cancelled_before_any_run_and_requeued_is_told_as_pending() -> None:
    old: dict[str, Any] = {"created_at": ago(hours=6), "attempts": 0, "started_at": None}
    entry = make_entry(State.CANCELLED, finished_at=ago(hours=5), **old)
    store(entry, "REVOKED", TaskRevokedError("cancelled"), at=ago(hours=5))
    outbox.requeue(entry.pk, actor="user:ann")
    OutboxEntry.objects.update(due_at=lately())
    look()
    assert told(entry).state == "PENDING"


@pytest.mark.parametrize("stored", ["SUCCESS", "FAILURE", "REVOKED"])
def test_no_end_is_told_of_an_entry_that_is_to_run_again(stored: str) -> None:
    attempt: dict[str, Any] = {
        "attempts": 1,
        "started_at": at(),
        "failures": 1,
        "error": "ValueError: no",
    }
    entry = make_entry(available_at=at(AHEAD), due_at=ago(hours=1), created_at=lately(), **attempt)
    store(entry, stored, ValueError("no") if stored != "SUCCESS" else 1)
    assert look().mismatched == 1
    assert told(entry).state == "RETRY"
    assert isinstance(told(entry).result, ValueError)


def test_no_end_is_told_of_a_run_that_goes_on() -> None:
    entry = make_entry(State.RUNNING)
    store(entry, "FAILURE", ValueError("lost"))
    look()
    assert told(entry).state == "STARTED"


def test_an_uncertain_entry_is_not_told_as_failed_and_not_as_uncertain_once_it_is_resolved() -> (
    None
):
    entry = make_entry(State.UNCERTAIN, due_at=ago(hours=1))
    begin_effect(entry)
    store(entry, "FAILURE", ValueError("no"))
    look()
    assert told(entry).state == "UNCERTAIN"
    assert not told(entry).ready()
    TaskResult.objects.update(date_done=ago(days=3))  # a person takes their time
    outbox.resolve(entry.pk, effect="mail", happened=False, actor="user:ann")
    look()
    assert told(entry).state == "RETRY"


def test_what_celery_says_of_an_open_entry_stays_while_it_is_no_end() -> None:
    entry = make_entry(State.PUBLISHED)
    store(entry, "STARTED", {})
    assert look().mismatched == 0


# --- what is not ours ---------------------------------------------------------------------------


def test_no_row_is_made_for_a_result_that_is_ignored_but_a_wrong_one_is_corrected() -> None:
    by_call = ended(State.SUCCEEDED, options={"ignore_result": True})
    by_task = ended(State.FAILED, task="outbox.tell_owner")
    assert look().mismatched == 0
    assert not TaskResult.objects.exists()
    store(by_call, "FAILURE", ValueError("no"))
    store(by_task, "SUCCESS")
    assert look().mismatched == 2
    assert (told(by_call).state, told(by_task).state) == ("SUCCESS", "FAILURE")


def test_no_row_is_made_for_a_task_that_nobody_here_knows_nor_for_an_external_one() -> None:
    ended(State.SUCCEEDED, task="gone.task")
    external = ended(State.SUCCEEDED, options={"consumer": "external"})
    assert look().mismatched == 0
    store(external, "FAILURE", ValueError("theirs"))
    assert look().mismatched == 0


def test_where_the_row_says_that_its_result_is_kept_nobody_need_know_the_task() -> None:
    kept = ended(State.CANCELLED, task="elsewhere.task", options={"ignore_result": False})
    ignored = ended(State.CANCELLED, task="elsewhere.task", options={"ignore_result": True})
    assert look().mismatched == 1
    assert (told(kept).state, told(ignored).state) == ("REVOKED", "PENDING")


@pytest.mark.parametrize("command", ["outbox_dispatcher", "outbox_reconcile"])
def test_a_process_that_is_no_worker_knows_the_tasks_all_the_same(
    surroundings: dict[str, str], tmp_path: Path, command: str
) -> None:
    """By plain SQL a row does not say whether its result is kept: only the task's code does."""
    entry = ended(State.CANCELLED, options={})
    argv = [sys.executable, "manage.py", command]
    with Process(command, argv=argv, log=tmp_path / "log", env=surroundings):
        wait_until(lambda: told(entry).state == "REVOKED", timeout=30)


def test_no_row_is_made_for_a_result_that_would_have_expired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(APP.backend, "expires", 3600)
    ended(State.SUCCEEDED, finished_at=ago(hours=2))
    assert look().mismatched == 0


def test_with_another_result_backend_nothing_is_compared_and_it_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended(State.SUCCEEDED)
    monkeypatch.setattr(APP._local, "backend", DisabledBackend(app=APP))
    found = look()
    assert found.mismatched == 0
    assert found.results == "Results are not compared: the result backend is another one."


def test_without_django_celery_results_nothing_is_compared_and_it_says_so(settings: Any) -> None:
    ended(State.SUCCEEDED)
    settings.INSTALLED_APPS = [
        name for name in settings.INSTALLED_APPS if name != "django_celery_results"
    ]
    assert "not installed" in look().results


def test_a_result_that_the_store_cannot_take_keeps_no_other_from_being_corrected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = ended(State.SUCCEEDED, result="odd"), ended(State.SUCCEEDED, result="fine")
    encode = APP.backend.encode_content

    def refuse(value: Any) -> Any:
        if value == "odd":
            raise TypeError("cannot be encoded")
        return encode(value)

    monkeypatch.setattr(APP.backend, "encode_content", refuse)
    assert look().mismatched == 1
    assert (told(first).state, told(second).state) == ("PENDING", "SUCCESS")
    assert TaskResult.objects.count() == 1


# --- races, and a reconcile that was away -------------------------------------------------------


def correct_in_a_thread(entry: OutboxEntry, *, stored: str | None) -> list[bool]:
    """Correct what was read of it, in a connection of its own; the answer comes into the list."""
    answers: list[bool] = []

    def correct() -> None:
        answers.append(result_store.correct(APP, entry, stored=stored, using="default"))
        connection.close()

    threading.Thread(target=correct, daemon=True).start()
    return answers


def waits_for_a_lock() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
        return bool(cursor.fetchone()[0])


def test_a_correction_of_an_entry_that_has_moved_on_is_not_written(
    second: psycopg.Connection,
) -> None:
    """A worker stores its first result, and a person requeues the entry, while it is made."""
    entry = ended(State.FAILED)
    with second.transaction():
        second.execute(
            "INSERT INTO django_celery_results_taskresult (task_id, status, content_type, "
            "content_encoding, date_created, date_done) VALUES (%s, 'PENDING', '', '', now(), "
            "now())",
            [str(entry.pk)],
        )
        answers = correct_in_a_thread(entry, stored=None)
        wait_until(waits_for_a_lock)
        assert outbox.requeue(entry.pk, actor="user:ann")
        second.execute("DELETE FROM django_celery_results_taskresult")
    wait_until(lambda: answers)
    assert answers == [False]
    assert not TaskResult.objects.exists()  # nor is the row left that was made to hold it


def test_a_result_that_is_stored_meanwhile_is_not_overwritten(second: psycopg.Connection) -> None:
    entry = ended(State.FAILED)
    with second.transaction():
        second.execute(
            "INSERT INTO django_celery_results_taskresult (task_id, status, content_type, "
            "content_encoding, date_created, date_done) VALUES (%s, 'FAILURE', '', '', now(), "
            "now())",
            [str(entry.pk)],
        )
        answers = correct_in_a_thread(entry, stored=None)
        wait_until(waits_for_a_lock)
    wait_until(lambda: answers)
    assert answers == [False]
    store(entry, "SUCCESS")
    assert not result_store.correct(APP, entry, stored="RETRY", using="default")
    assert told(entry).state == "SUCCESS"


def test_a_parked_entry_of_which_nothing_is_stored_is_told_as_uncertain() -> None:
    """Its worker was killed, and Celery has stored nothing."""
    entry = make_entry(State.UNCERTAIN)
    assert look().mismatched == 1
    assert told(entry).state == "UNCERTAIN"
    assert not told(entry).ready()
    assert look().mismatched == 0


def test_a_dry_run_counts_each_entry_once() -> None:
    entry = ended(State.CANCELLED)
    store(entry, "SUCCESS")
    assert (look(dry=True).mismatched, look().mismatched) == (1, 1)


def test_who_inserts_a_result_and_does_not_commit_is_waited_for_no_longer_than_the_patience(
    second: psycopg.Connection,
) -> None:
    held, other = ended(State.CANCELLED), ended(State.CANCELLED)
    with second.transaction():
        columns = ", ".join(_REQUIRED)
        values = ", ".join(["%s"] * len(_REQUIRED))
        insert = f"INSERT INTO django_celery_results_taskresult ({columns}) VALUES ({values})"
        second.execute(insert, [str(held.pk), *list(_REQUIRED.values())[1:]])
        assert look().mismatched == 1
        assert told(other).state == "REVOKED"


_REQUIRED = {
    "task_id": None,
    "status": "STARTED",
    "content_type": "application/json",
    "content_encoding": "utf-8",
    "date_created": "now",
    "date_done": "now",
}


def test_a_worker_that_is_storing_now_is_not_waited_for(second: psycopg.Connection) -> None:
    entry = ended(State.FAILED)
    store(entry, "STARTED", {})
    with second.transaction():
        second.execute("SELECT FROM django_celery_results_taskresult FOR UPDATE")
        assert look().mismatched == 0
    assert look().mismatched == 1


def test_what_a_late_write_of_celery_leaves_is_corrected_however_long_ago_the_entry_ended() -> None:
    entry = ended(State.CANCELLED, finished_at=ago(days=3))
    ticks.note_compared(ago(minutes=1), using="default")
    store(entry, "SUCCESS", 1)
    assert look().mismatched == 1
    assert told(entry).state == "REVOKED"


def test_what_ended_just_now_is_left_to_the_worker_that_stores_it() -> None:
    ended(State.SUCCEEDED, finished_at=at())
    assert look().mismatched == 0


def test_what_ended_while_no_reconcile_ran_is_found_afterwards() -> None:
    ticks.note_compared(ago(hours=9), using="default")
    entry = ended(State.CANCELLED, finished_at=ago(hours=8))
    assert look().mismatched == 1
    assert told(entry).state == "REVOKED"
    seen = ticks.compared_until(using="default")
    assert seen is not None
    assert seen > ago(minutes=2)


def test_what_one_pass_leaves_the_next_ones_go_on_with(
    monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "REPAIRS_PER_PASS": 4}
    monkeypatch.setattr(results, "CHUNK", 2)
    make_entries(9, State.SUCCEEDED, finished_at=ago(hours=1))
    ticks.note_compared(ago(hours=2), using="default")
    assert [look().mismatched for _ in range(4)] == [4, 4, 1, 0]


def test_entries_that_agree_are_read_within_bounds_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "CHUNK", 1)
    monkeypatch.setattr(results, "MOST", 2)
    for minutes in (90, 80, 70, 60):
        entry = ended(State.SUCCEEDED, finished_at=ago(minutes=minutes))
        store(entry, "SUCCESS", 1, at=ago(days=9))
    last = ended(State.SUCCEEDED, finished_at=ago(minutes=50))
    ticks.note_compared(ago(minutes=95), using="default")
    passes = [look().mismatched for _ in range(6)]
    assert sum(passes) == 1
    assert passes[0] == 0
    assert told(last).state == "SUCCESS"


def test_a_dry_run_counts_a_mismatch_and_leaves_it() -> None:
    ended(State.CANCELLED)
    assert look(dry=True).mismatched == 1
    assert not TaskResult.objects.exists()
    assert ticks.compared_until(using="default") is None

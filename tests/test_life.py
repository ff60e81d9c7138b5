"""The life of an entry, from the row to its recorded end, with real workers."""

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import chain, chord, group
from django.contrib.auth.models import Group
from django.db import transaction

import outbox
from outbox import maintenance
from outbox.drill.processes import Process
from outbox.lifecycle import publish
from outbox.models import OutboxEntry
from outbox.states import State
from tests import tasks
from tests.factories import make_entry, reread
from tests.following import APP, ended, entry_of, hint_of, stored
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.usefixtures("worker")
def test_what_runs_comes_from_the_row_not_from_the_message(tmp_path: Path) -> None:
    path = tmp_path / "ran"
    entry = make_entry(State.PUBLISHED, task="tests.tasks.noted", args=[str(path), "row"])
    forged = hint_of(
        entry, args=f'["{path}", "forged"]', kwargs="{}", options={"payload": "message"}
    )
    publish.publish_committed(APP, [forged], using="default")
    wait_until(lambda: reread(entry).is_final)
    assert path.read_text() == f"{entry.pk} 0 row\n"


@pytest.mark.usefixtures("worker")
def test_an_argument_that_only_looks_like_one_of_kombus_runs_as_it_is() -> None:
    given = {"__type__": "product", "__value__": 1}
    assert ended(tasks.echo.delay(given)).result == [[given], {}]


@pytest.mark.usefixtures("worker")
def test_a_duplicate_delivery_runs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ran"
    with transaction.atomic():
        result = tasks.noted.delay(str(path))
    for _ in range(5):
        publish.publish_committed(APP, [hint_of(entry_of(result))], using="default")
    ended(result)
    assert ended(tasks.add.delay(1, 1)).result == 2
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.usefixtures("worker")
def test_a_delivery_without_a_row_is_dropped(tmp_path: Path) -> None:
    ghost = hint_of(OutboxEntry(pk=uuid4(), task="tests.tasks.noted"), args=f'["{tmp_path}/x"]')
    publish.publish_committed(APP, [ghost], using="default")
    ended(tasks.add.delay(1, 1))
    assert not (tmp_path / "x").exists()


@pytest.mark.usefixtures("worker")
def test_a_plain_message_is_adopted_while_a_team_rolls_out(tmp_path: Path) -> None:
    path, task_id = tmp_path / "ran", str(uuid4())
    plain = APP.amqp.as_task_v2(task_id, "tests.tasks.adopted", (str(path),), {})
    with APP.producer_or_acquire() as producer:
        APP.amqp.send_task_message(producer, "tests.tasks.adopted", plain)
    entry = wait_until(lambda: OutboxEntry.objects.filter(pk=task_id, status="succeeded").first())
    assert path.read_text() == "adopted\n"
    assert entry is not None
    assert entry.attempts == 1


@pytest.mark.usefixtures("worker")
def test_a_failure_keeps_its_error_and_traceback_and_tells_the_owner() -> None:
    result = tasks.failing.delay("the printer is on fire")
    entry = ended(result)
    assert (entry.status, entry.failures, entry.attempts) == (State.FAILED, 1, 1)
    assert entry.error == "ValueError: the printer is on fire"
    assert "in failing" in entry.traceback
    assert stored(result, "FAILURE")
    assert OutboxEntry.objects.get(task="outbox.tell_owner").args == ["tests", "default"]
    assert entry.notices.get().about == "failed"


@pytest.mark.usefixtures("worker")
def test_the_retry_budget_is_celerys_and_every_attempt_is_kept(tmp_path: Path) -> None:
    result = tasks.flaky.delay(str(tmp_path / "tries"))
    entry = ended(result)
    assert (entry.status, entry.attempts, entry.failures) == (State.FAILED, 3, 3)
    assert entry.error == "Passing: attempt 3"
    verbs = list(entry.events.values_list("verb", "attempt", "error"))
    assert verbs == [
        ("retry", 1, "Passing: attempt 1"),
        ("retry", 2, "Passing: attempt 2"),
        ("fail", 3, "Passing: attempt 3"),
    ]
    assert all("in flaky" in text for text in entry.events.values_list("traceback", flat=True))


@pytest.mark.usefixtures("worker")
def test_a_retry_that_succeeds_ends_as_succeeded_with_one_id(tmp_path: Path) -> None:
    result = tasks.flaky.delay(str(tmp_path / "tries"), succeed_at=2)
    entry = ended(result)
    assert (entry.status, entry.result, entry.attempts, entry.failures) == ("succeeded", 2, 2, 1)
    assert entry.error == ""
    assert stored(result, "SUCCESS")


@pytest.mark.usefixtures("worker")
def test_requeue_gives_a_new_budget(tmp_path: Path) -> None:
    result = tasks.flaky.delay(str(tmp_path / "tries"), succeed_at=5)
    assert ended(result).status == State.FAILED
    assert outbox.requeue(result.id, actor="user:ann")
    entry = ended(result)
    assert (entry.status, entry.attempts, entry.failures) == (State.SUCCEEDED, 5, 4)
    assert entry.events.get(verb="requeue").actor == "user:ann"


@pytest.mark.usefixtures("worker")
def test_retry_with_other_arguments_rewrites_the_row(tmp_path: Path) -> None:
    path = tmp_path / "left"
    entry = ended(tasks.rewriting.delay(str(path), 2))
    assert path.read_text().split() == ["2", "1", "0"]
    assert (entry.result, entry.args) == ("done", [str(path), 0])
    reasons = entry.events.values_list("reason", flat=True)
    assert list(reasons) == ["rewrites args, kwargs"] * 2


@pytest.mark.usefixtures("worker")
def test_ignore_succeeds_and_reject_fails() -> None:
    assert ended(tasks.ignoring.delay()).status == State.SUCCEEDED
    assert ended(tasks.rejecting.delay()).status == State.FAILED


@pytest.mark.usefixtures("worker")
def test_a_before_start_that_raises_is_a_recorded_failure() -> None:
    entry = ended(tasks.unready.delay())
    assert (entry.status, entry.error) == (State.FAILED, "RuntimeError: not ready")


@pytest.mark.usefixtures("worker")
def test_an_atomic_body_commits_with_its_completion_or_not_at_all() -> None:
    assert ended(tasks.group_made.delay("kept")).status == State.SUCCEEDED
    assert ended(tasks.group_made.delay("undone", fail=True)).status == State.FAILED
    assert set(Group.objects.values_list("name", flat=True)) == {"kept"}


@pytest.mark.usefixtures("worker")
def test_an_atomic_body_that_ignores_keeps_its_effect() -> None:
    assert ended(tasks.group_made_and_ignored.delay("kept")).status == State.SUCCEEDED
    assert Group.objects.filter(name="kept").exists()


def test_an_atomic_body_whose_entry_was_cancelled_rolls_back(
    worker: Process, tmp_path: Path
) -> None:
    started, until = tmp_path / "started", tmp_path / "until"
    result = tasks.group_waiting.delay("late", str(started), str(until))
    wait_until(started.exists)
    assert outbox.cancel(result.id, actor="user:ann", reason="not wanted")
    until.touch()
    wait_until(lambda: not entry_of(result).run_goes_on)
    assert entry_of(result).status == State.CANCELLED
    assert not Group.objects.exists()
    verbs = set(entry_of(result).events.values_list("verb", flat=True))
    assert verbs == {"cancel", "late", "settle"}


@pytest.mark.usefixtures("worker")
def test_a_cancelled_entry_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "ran"
    with transaction.atomic():
        result = tasks.noted.delay(str(path))
        assert outbox.cancel(result.id, actor="user:ann")
    ended(tasks.add.delay(1, 1))
    assert not path.exists()
    assert outbox.cancel(result.id, actor="user:ann") is False


@pytest.mark.usefixtures("worker")
def test_a_chain_runs_to_its_end_step_by_step() -> None:
    result = chain(tasks.add.s(1, 2), tasks.add.s(3), tasks.add.s(4)).apply_async()
    assert ended(result).result == 10
    first = OutboxEntry.objects.get(args=[1, 2])
    assert set(OutboxEntry.objects.values_list("root_id", flat=True)) == {first.pk}
    assert OutboxEntry.objects.count() == 3


@pytest.mark.usefixtures("worker")
def test_a_link_is_owed_once_with_the_result() -> None:
    result = tasks.add.apply_async((1, 2), link=tasks.add.s(10))
    parent = ended(result)
    child = wait_until(lambda: OutboxEntry.objects.filter(parent_id=parent.pk).first())
    assert child is not None
    assert child.args == [3, 10]
    wait_until(lambda: reread(child).is_final)
    assert OutboxEntry.objects.count() == 2


@pytest.mark.usefixtures("worker")
def test_a_chord_runs_its_body_with_the_results() -> None:
    result = chord(tasks.add.s(n, n) for n in range(3))(tasks.total.s())
    assert ended(result).result == 6
    assert OutboxEntry.objects.count() == 4


@pytest.mark.usefixtures("worker")
def test_a_group_runs_all_its_tasks() -> None:
    results = group(tasks.add.s(n, n) for n in range(4)).apply_async()
    assert [ended(result).result for result in results] == [0, 2, 4, 6]


@pytest.mark.usefixtures("worker")
def test_the_retry_deadline_ends_an_entry_whose_next_start_would_be_too_late(
    tmp_path: Path,
) -> None:
    result = tasks.hopeless.delay()
    entry = ended(result)
    assert (entry.status, entry.attempts) == (State.FAILED, 1)
    assert entry.error.startswith("Passing")
    assert "past its retry deadline" in entry.events.get().reason


@pytest.mark.usefixtures("worker")
def test_a_result_that_is_not_json_does_not_keep_the_entry_from_its_end() -> None:
    entry = ended(tasks.strange_result.delay())
    assert (entry.status, entry.result) == (State.SUCCEEDED, None)


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("how", ["atomic", "BEGIN", "autocommit"])
def test_a_body_that_leaves_a_transaction_open_fails_alone(how: str) -> None:
    _fails_alone(tasks.leaving_open.delay("lost", how))


@pytest.mark.usefixtures("worker")
def test_an_atomic_body_that_leaves_a_block_open_fails_alone() -> None:
    _fails_alone(tasks.leaving_open_atomically.delay("lost"))


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("how", ["COMMIT", "ROLLBACK", "COMMIT AND CHAIN"])
def test_an_atomic_body_that_ends_its_transaction_by_hand_fails_and_is_told_so(how: str) -> None:
    entry = ended(tasks.ending_its_transaction.delay("kept", how))
    assert (entry.status, entry.attempts) == (State.FAILED, 1)
    assert "ended its task's transaction on 'default' by hand" in entry.error
    assert set(Group.objects.values_list("name", flat=True)) <= {"kept"}  # and not what came after
    assert ended(tasks.add.delay(1, 2)).result == 3


@pytest.mark.usefixtures("worker")
def test_an_atomic_body_that_returns_over_a_connection_that_is_gone_runs_again(
    tmp_path: Path,
) -> None:
    result = tasks.group_made_and_connection_lost.delay("once", str(tmp_path / "ran"))
    entry = ended(result)
    assert (entry.status, entry.attempts, entry.releases) == (State.SUCCEEDED, 2, 1)
    assert Group.objects.get().name == "once"


def _fails_alone(left_open: Any) -> None:
    entry = ended(left_open)
    assert entry.status == State.FAILED
    assert "left a transaction open on ['default']" in entry.error
    assert not Group.objects.exists()
    results = [ended(tasks.add.delay(n, n)).result for n in range(4)]  # both children
    assert results == [0, 2, 4, 6]


@pytest.mark.usefixtures("worker")
def test_the_copy_that_a_body_has_forked_ends_nothing() -> None:
    entry = ended(tasks.forking.delay())
    assert (entry.status, entry.attempts, entry.result) == (State.SUCCEEDED, 1, "the original")


@pytest.mark.usefixtures("worker")
def test_a_plain_sql_entry_runs() -> None:
    entry = make_entry(State.PENDING)
    maintenance.dispatch(APP, using="default")
    wait_until(lambda: reread(entry).is_final)
    assert reread(entry).result == 3

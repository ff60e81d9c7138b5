"""What the drill says of the result store: ahead of a record, behind it, or in agreement."""

from __future__ import annotations

from uuid import UUID

import pytest
from django_celery_results.models import TaskResult

from outbox.drill import record, results
from outbox.drill.tasks import touch
from outbox.states import State
from tests.factories import make_entry

pytestmark = pytest.mark.django_db


def stored(entry_id: UUID, status: str) -> None:
    TaskResult.objects.create(task_id=str(entry_id), status=status)


@pytest.mark.parametrize(
    ("state", "said", "early"),
    [
        (State.RUNNING, "SUCCESS", 1),
        (State.PENDING, "FAILURE", 1),
        (State.PUBLISHED, "REVOKED", 1),
        (State.UNCERTAIN, "FAILURE", 1),
        (State.RUNNING, "STARTED", 0),
        (State.PENDING, "RETRY", 0),
        (State.SUCCEEDED, "SUCCESS", 0),
        (State.FAILED, "FAILURE", 0),
    ],
)
def test_a_final_state_that_is_stored_of_an_open_entry_is_noted(
    state: State, said: str, early: int
) -> None:
    results.watch()
    entry = make_entry(state)
    stored(entry.pk, said)
    TaskResult.objects.create(task_id="not-a-uuid-of-an-entry", status="SUCCESS")
    assert results.stored_early([entry.pk]) == early


@pytest.mark.parametrize(
    ("state", "said", "agrees"),
    [
        (State.SUCCEEDED, "SUCCESS", True),
        (State.SUCCEEDED, "FAILURE", False),
        (State.SUCCEEDED, "STARTED", False),
        (State.FAILED, "SUCCESS", False),
        (State.CANCELLED, "REVOKED", True),
        (State.CANCELLED, "STARTED", False),
        (State.RUNNING, "STARTED", True),
        (State.UNCERTAIN, "FAILURE", False),
        (State.PENDING, "REVOKED", False),
    ],
)
def test_what_differs_from_the_record_is_a_sentence(state: State, said: str, agrees: bool) -> None:
    entry = make_entry(state)
    stored(entry.pk, said)
    found = results.disagreements(record.jobs([entry.pk]))
    sentence = f"the result store says {said} of {entry.pk}, which is {state}"
    assert found == ([] if agrees else [sentence])


@pytest.mark.parametrize(("task", "agrees"), [("tests.tasks.add", False), (touch.name, True)])
def test_nothing_need_be_stored_of_a_task_whose_results_are_ignored(
    task: str, agrees: bool
) -> None:
    entry = make_entry(State.SUCCEEDED, task=task)
    assert bool(results.disagreements(record.jobs([entry.pk]))) is not agrees

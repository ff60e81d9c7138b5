"""The life of an entry, from the row to its recorded end, with real workers."""

from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction
from django_celery_results.models import TaskResult

from outbox import maintenance
from outbox.models import OutboxEntry
from outbox.states import State
from tests import tasks
from tests.waiting import wait_until
from tests.worker import app

pytestmark = pytest.mark.django_db(transaction=True)


def entry_of(result: Any) -> OutboxEntry:
    return OutboxEntry.objects.get(pk=result.id)


def ended(result: Any, *, publishing: bool = False) -> OutboxEntry:
    """Wait for the entry's end; with `publishing`, dispatch meanwhile as beat would."""

    def look() -> OutboxEntry | None:
        if publishing:
            maintenance.dispatch(app, using="default")
        entry = entry_of(result)
        return entry if entry.is_final else None

    return wait_until(look, timeout=30)


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_committed_entry_runs_once_and_keeps_its_result(
    start_worker: Callable[..., Any], pool: str
) -> None:
    start_worker(f"--pool={pool}", "-c", "2")
    with transaction.atomic():
        result = tasks.add.delay(2, 3)
        assert entry_of(result).status == State.PENDING
    entry = ended(result)
    assert (entry.status, entry.result, entry.attempts) == (State.SUCCEEDED, 5, 1)
    assert entry.publishes == 1
    assert entry.events.count() == 0
    assert (
        wait_until(lambda: TaskResult.objects.filter(task_id=result.id).first()).status == "SUCCESS"
    )

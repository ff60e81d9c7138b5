"""What the tests of the life of an entry share."""

from typing import Any

from django_celery_results.models import TaskResult

from outbox import maintenance
from outbox.lifecycle import publish
from outbox.models import OutboxEntry
from tests import tasks
from tests.waiting import wait_until

APP = tasks.add.app


def entry_of(result: Any) -> OutboxEntry:
    return OutboxEntry.objects.get(pk=result.id)


def ended(result: Any) -> OutboxEntry:
    """Wait for the entry's end, dispatching meanwhile as beat would."""

    def look() -> OutboxEntry | None:
        maintenance.dispatch(APP, using="default")
        entry = OutboxEntry.objects.filter(pk=result.id).first()
        return entry if entry and entry.is_final else None

    found = wait_until(look, timeout=30)
    assert found is not None
    return found


def stored(result: Any, status: str) -> TaskResult:
    """What Celery's own result says, once it says `status`."""
    found = wait_until(
        lambda: TaskResult.objects.filter(task_id=result.id, status=status).first(), timeout=10
    )
    assert found is not None
    return found


def hint_of(entry: OutboxEntry, **changes: Any) -> publish.Delivery:
    row = {
        "id": entry.pk,
        "version": 0,
        "task": entry.task,
        "args": "[]",
        "kwargs": "{}",
        "options": {},
        "queue": "celery",
        "priority": 0,
        "retries": 0,
        "root_id": None,
        "parent_id": None,
    }
    return publish.Delivery(**{**row, **changes})

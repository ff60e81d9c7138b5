"""What follows an end is owed by that end: links, errbacks and chains, whatever ended the entry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import transaction

from outbox.events import Note
from outbox.lifecycle.publish import dispatch
from outbox.models import OutboxEntry
from outbox.states import State
from outbox.transitions import FOLLOW
from tests import tasks
from tests.following import APP, ended
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

USING = "default"
NOTE = Note("tests", "because", error="ValueError: no", traceback="Traceback …")
CALLED = [{"task": "tests.tasks.hearing", "args": ["/dev/null"], "kwargs": {}, "options": {}}]


def owed() -> list[OutboxEntry]:
    return list(OutboxEntry.objects.filter(task=FOLLOW).order_by("pk"))


def followed(entry: OutboxEntry) -> list[OutboxEntry]:
    """Wait until all that follows the entry, and what that has owed, has ended."""

    def look() -> list[OutboxEntry] | None:
        dispatch(APP, using=USING)
        rows = list(OutboxEntry.objects.exclude(pk=entry.pk).exclude(task="outbox.tell_owner"))
        return rows if all(row.is_final for row in rows) else None

    found = wait_until(look, timeout=30)
    assert found is not None
    return found


def errbacks(path: Path) -> list[Any]:
    return [tasks.hearing.s(str(path)), tasks.deaf.s(), tasks.hearing_of.s(str(path))]


def is_heard(entry: OutboxEntry, path: Path, *, error: str) -> None:
    """Each errback happened once, also beside one that fails and undoes what it wrote."""
    rows = followed(entry)
    lines = sorted(path.read_text().splitlines())
    assert lines == [f"{entry.pk} called: {error}", f"{entry.pk} owed"]
    assert not Group.objects.exists()
    assert sorted(row.status for row in rows if row.task == FOLLOW) == [
        State.FAILED,
        State.SUCCEEDED,
        State.SUCCEEDED,
    ]
    (run,) = [row for row in rows if row.task != FOLLOW]
    assert (run.task, run.parent_id, run.root_id) == ("tests.tasks.hearing_of", entry.pk, entry.pk)


# What ends a run: the signature, what its row is changed to, and what the errback hears.
RUNS: dict[str, tuple[Callable[[Path], Any], dict[str, int], str]] = {
    "an error": (lambda _: tasks.failing.s("no"), {}, "ValueError: no"),
    "the retry budget": (
        lambda folder: tasks.flaky.s(str(folder / "tries")), {}, "Passing: attempt 3"
    ),
    "the retry deadline": (lambda _: tasks.hopeless.s(), {}, "Passing: no"),
    "Reject": (lambda _: tasks.rejecting.s(), {}, "TaskExited: Reject: not mine"),
    "SystemExit": (lambda _: tasks.leaving.s("SystemExit"), {}, "SystemExit: SystemExit"),
    "MemoryError": (lambda _: tasks.leaving.s("MemoryError"), {}, "MemoryError: MemoryError"),
    "before_start": (lambda _: tasks.unready.s(), {}, "RuntimeError: not ready"),
    "a killed child": (lambda _: tasks.suicidal.s(), {"crash_limit": 1}, "EntryFailed: its child"),
    "the hard time limit": (
        lambda folder: tasks.limited.s(str(folder / "never")),
        {"failure_limit": 1},
        "TimeLimitExceeded: 1 seconds",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("how", RUNS)
def test_errbacks_happen_once_whatever_ends_the_run(tmp_path: Path, how: str) -> None:
    signature, changes, error = RUNS[how]
    path = tmp_path / "heard"
    with transaction.atomic():
        result = signature(tmp_path).apply_async(link_error=errbacks(path))
        if changes:
            OutboxEntry.objects.filter(pk=result.id).update(**changes)
    entry = ended(result)
    assert entry.status == State.FAILED
    if how == "a killed child":
        error = f"EntryFailed: {entry.error}"
    is_heard(entry, path, error=error)

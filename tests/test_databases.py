"""An outbox in each of two databases: an entry belongs to the one whose transaction owes it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from django.contrib.auth.models import Group
from django.db import transaction

from outbox import maintenance
from outbox.drill.processes import Process
from outbox.errors import MisuseError
from outbox.models import OutboxEntry, OutboxTick
from outbox.states import State
from tests import tasks
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture(autouse=True)
def _both(settings: Any) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "DATABASES": ["default", "other"]}


def test_the_entry_commits_with_the_other_databases_transaction() -> None:
    with transaction.atomic(using="other"):
        tasks.add.apply_async((1, 2), using="other")
        transaction.set_rollback(True, using="other")
    assert not OutboxEntry.objects.using("other").exists()
    tasks.add.apply_async((1, 2), using="other", countdown=60)
    assert OutboxEntry.objects.using("other").count() == 1
    assert not OutboxEntry.objects.using("default").exists()


def test_a_worker_claims_and_ends_it_where_it_lives(
    start_worker: Callable[..., Process], tmp_path: Path
) -> None:
    start_worker(TESTS_DATABASES="default,other")
    path = tmp_path / "ran"
    with transaction.atomic(using="other"):
        result = tasks.noted.apply_async((str(path),), using="other")
    ended = OutboxEntry.objects.using("other").filter(pk=result.id, status=State.SUCCEEDED)
    assert wait_until(ended.exists)
    assert path.read_text() == f"{result.id} 0 ran\n"


def test_an_atomic_body_commits_with_its_completion_in_the_database_where_it_lives(
    start_worker: Callable[..., Process],
) -> None:
    start_worker(TESTS_DATABASES="default,other")
    for name, fail in (("kept", False), ("undone", True)):
        tasks.group_made_in.apply_async(("other", name, fail), using="other")
    ended = OutboxEntry.objects.using("other").filter(task=tasks.group_made_in.name)
    wait_until(lambda: ended.filter(finished_at__isnull=False).count() == 2)
    assert {entry.status for entry in ended} == {State.SUCCEEDED, State.FAILED}
    assert list(Group.objects.using("other").values_list("name", flat=True)) == ["kept"]


def test_what_follows_an_entry_is_owed_where_it_lives(
    start_worker: Callable[..., Process], tmp_path: Path
) -> None:
    start_worker(TESTS_DATABASES="default,other")
    path, app = tmp_path / "heard", tasks.add.app
    link, step, errback = (
        tasks.hearing_of.si(name, str(path)) for name in ("link", "step", "errback")
    )
    done = tasks.echo.si().set(link=link, using="other")
    (done | step).apply_async(using="other")
    tasks.failing.apply_async(link_error=errback, using="other")

    def heard() -> bool:
        maintenance.dispatch(app, using="other")
        return path.exists() and path.read_text().count("\n") == 3

    wait_until(heard, timeout=30)
    assert sorted(path.read_text().split()) == ["errback", "link", "owed", "owed", "owed", "step"]
    assert not OutboxEntry.objects.using("default").exists()


_TICKS = """
import django
django.setup()
from outbox.tasks import dispatch_tick, reconcile_tick
from tests import tasks  # their app
for tick in (dispatch_tick, reconcile_tick):
    try:
        tick()
    except django.db.OperationalError as error:
        print(error)
"""


def test_a_database_that_is_away_keeps_no_tick_from_the_others(
    surroundings: dict[str, str], valkey: redis.Redis
) -> None:
    """As beat runs them, in a process whose first database is not there."""
    for using in ("default", "other"):
        row = OutboxEntry(task=tasks.add.name, args=[1, 2], kwargs={})
        OutboxEntry.objects.using(using).bulk_create([row])
    env = {**os.environ, **surroundings, "TESTS_DATABASES": "gone,default,other"}
    ran = subprocess.run(
        [sys.executable, "-c", _TICKS], env=env, capture_output=True, text=True, check=True
    )
    assert ran.stdout.count("nowhere") == 2, ran.stderr
    assert valkey.llen("celery") == 2
    for using in ("default", "other"):
        assert OutboxTick.objects.using(using).filter(name="reconcile").exists()


def test_a_database_that_nobody_dispatches_from_is_refused() -> None:
    with pytest.raises(MisuseError, match="DATABASES"):
        tasks.add.apply_async((1, 2), using="third")

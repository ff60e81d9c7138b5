"""Errors of the database that are no outage: one part of a tick fails, and nothing else does."""

from __future__ import annotations

import time
from collections.abc import Mapping
from io import StringIO
from typing import Any

import pytest
import redis
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection

from outbox import maintenance, status
from outbox.dispatcher import Dispatcher
from outbox.lifecycle import lease, prune
from outbox.lifecycle.reconcile import over_age
from outbox.models import OutboxEntry, OutboxTick
from outbox.states import State
from outbox.worker.rounds import AGAIN
from outbox.worker.ticker import Ticker
from tests import tasks
from tests.factories import ago, make_entry, reread

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]

APP = tasks.add.app


def mistake(*args: Any, **how: Any) -> Any:
    """What a row may do to a statement that looks at all of them."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT 'abc'::float8")


def away(*args: Any, **how: Any) -> Any:
    raise OperationalError("the server is away")


def findings(name: str) -> Mapping[str, Any]:
    tick = OutboxTick.objects.get(name=name)
    assert tick.last_at is not None
    return dict(tick.findings)


def test_a_part_of_reconcile_that_fails_leaves_the_others_and_the_tick_is_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lease, "sweep", mistake)
    entry = make_entry(due_at=ago(hours=1), available_at=ago(hours=-1))
    found = maintenance.reconcile(APP, using="default")
    assert found is not None
    assert found == findings("reconcile")
    assert found["failed"].startswith("sweep: DataError: invalid input syntax")
    assert found["over_age"] == 1
    assert reread(entry).over_age_at is not None
    assert "outbox.tick.failed in default: sweep: DataError" in caplog.text


def test_a_tick_of_which_a_part_failed_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_age, "tell", mistake)
    maintenance.dispatch(APP, using="default")
    maintenance.reconcile(APP, using="default")
    (problem,) = status.read(APP, using="default").problems
    assert problem.code == "tick_failed"
    assert "over age: DataError" in problem.message


def test_a_sweep_that_fails_keeps_nothing_from_being_published(
    monkeypatch: pytest.MonkeyPatch, valkey: redis.Redis
) -> None:
    monkeypatch.setattr(lease, "sweep", mistake)
    entry = make_entry(available_at=ago(seconds=9), publish_after=ago(seconds=9))
    assert maintenance.dispatch(APP, using="default")["published"] == 1
    assert reread(entry).status == State.PUBLISHED
    assert "sweep: DataError" in findings("dispatch")["failed"]


def test_a_prune_that_fails_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prune, "prune", mistake)
    maintenance.prune(using="default")
    assert findings("prune")["failed"].startswith("prune: DataError")


def test_an_outage_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_age, "tell", away)
    with pytest.raises(OperationalError):
        maintenance.reconcile(APP, using="default")
    assert OutboxTick.objects.get(name="reconcile").last_at is None


def test_the_dispatcher_does_its_other_ticks_after_a_mistake(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(over_age, "tell", mistake)
    assert Dispatcher(APP, ["default"])._once("default")
    assert findings("prune") == {"pruned": 0}
    assert "outbox.database.away" not in caplog.text


def test_a_worker_does_not_repeat_at_once_what_met_a_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(over_age, "tell", mistake)
    ticker = Ticker(APP)
    ticker.look()
    assert findings("reconcile")["failed"]
    pause = ticker._due["reconcile default"] - time.monotonic()
    assert pause > AGAIN


@pytest.mark.parametrize(
    ("command", "part"),
    [
        (["outbox_reconcile"], (over_age, "tell")),
        (["outbox_prune"], (prune, "prune")),
        (["outbox_dispatcher", "--once"], (lease, "sweep")),
    ],
)
def test_a_command_says_in_one_sentence_what_failed(
    monkeypatch: pytest.MonkeyPatch, command: list[str], part: tuple[Any, str]
) -> None:
    monkeypatch.setattr(*part, mistake)
    with pytest.raises(CommandError, match="DataError: invalid input syntax") as raised:
        call_command(*command, stdout=StringIO())
    assert "\n" not in str(raised.value)
    assert OutboxEntry.objects.count() == 0

"""outbox_status: what is counted, what counts as a problem, and what people are told."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from io import StringIO
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command

from outbox import maintenance, standing, status
from outbox.models import OutboxEntry, OutboxQueue, OutboxTick, OutboxWorker
from outbox.states import State
from tests.factories import ago, make_entries, make_entry, parked
from tests.worker import app

if TYPE_CHECKING:
    from django.test import Client
    from pytest_django import DjangoAssertNumQueries, Settings

pytestmark = pytest.mark.django_db


@pytest.fixture
def _ticking() -> None:
    """The ticks have just run."""
    for name in ("dispatch", "reconcile"):
        OutboxTick.objects.create(name=name, last_at=ago(seconds=0), findings={"published": 2})


def shown(*arguments: str) -> tuple[str, int]:
    """What the command prints, and its exit status."""
    out = StringIO()
    try:
        call_command("outbox_status", *arguments, stdout=out)
    except SystemExit as error:
        return out.getvalue(), int(str(error.code))
    return out.getvalue(), 0


def as_json() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shown("--format", "json")[0])
    return found


def codes() -> list[str]:
    return [problem["code"] for problem in as_json()["problems"]]


@pytest.mark.usefixtures("_ticking")
def test_an_empty_outbox_whose_ticks_run_is_healthy() -> None:
    words, code = shown()
    assert "healthy" in words.splitlines()[0]
    assert code == 0


def test_the_json_has_the_documented_keys() -> None:
    found = as_json()
    assert list(found) == [
        "version",
        "at",
        "healthy",
        "problems",
        "counts",
        "queues",
        "oldest_unfinished_seconds",
        "oldest_published_seconds",
        "oldest_uncertain_seconds",
        "workers",
        "refused",
        "ticks",
    ]
    assert found["version"] == 1
    assert datetime.fromisoformat(found["at"]).tzinfo is not None
    assert found["counts"] == dict.fromkeys(map(str, State), 0)
    assert found["oldest_unfinished_seconds"] is None


def test_each_state_is_counted() -> None:
    for number, state in enumerate(State, start=1):
        make_entries(number, state)
    assert as_json()["counts"] == {
        state.value: number for number, state in enumerate(State, start=1)
    }


def test_ended_entries_are_counted_up_to_a_limit_and_the_text_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(standing, "LOOKED_AT", 2)
    make_entries(3, State.SUCCEEDED)
    assert as_json()["counts"]["succeeded"] == 2
    assert "2 or more" in shown()[0]


def test_a_queue_says_what_is_due_and_for_how_long() -> None:
    make_entry(available_at=ago(seconds=30))
    make_entry(available_at=ago(seconds=-60), due_at=ago(seconds=-60))
    make_entry(State.PUBLISHED, published_at=ago(seconds=20))
    make_entry(State.RUNNING, queue="mail", due_at=ago(seconds=90))
    found = as_json()
    celery, mail = found["queues"]
    assert 30 <= celery.pop("oldest_due_seconds") < 60
    assert celery == {"name": "celery", "pending": 2, "due": 1, "published": 1, "running": 0}
    assert (mail["name"], mail["running"], mail["oldest_due_seconds"]) == ("mail", 1, None)
    assert 20 <= found["oldest_published_seconds"] < 50
    assert 90 <= found["oldest_unfinished_seconds"] < 120


def test_a_tick_says_when_it_ran_and_what_it_found(valkey: Any) -> None:
    maintenance.dispatch(app, using="default")
    dispatch, reconcile, prune = as_json()["ticks"]
    assert dispatch["name"] == "dispatch"
    assert datetime.fromisoformat(dispatch["last_at"]).tzinfo is not None
    assert dispatch["duration_seconds"] > 0
    assert dispatch["findings"]["published"] == 0
    never: dict[str, Any] = {"last_at": None, "duration_seconds": None, "findings": {}}
    assert reconcile == {"name": "reconcile", **never}
    assert prune == {"name": "prune", **never}


def test_a_finding_that_is_an_empty_text_is_left_out(admin_client: Client) -> None:
    OutboxTick.objects.create(
        name="dispatch", last_at=ago(seconds=0), findings={"broker": "", "crashed": 0}
    )
    page = admin_client.get("/admin/celery_outbox/outboxtick/").content.decode()
    for words in (shown()[0], page):
        assert "crashed 0" in words
        assert "broker ," not in words


def test_workers_with_a_heartbeat_are_counted() -> None:
    OutboxWorker.objects.create(id=uuid4())
    OutboxWorker.objects.create(id=uuid4(), heartbeat_at=ago(minutes=5))
    OutboxWorker.objects.create(id=uuid4(), stopped_at=ago(seconds=1))
    assert as_json()["workers"] == 1
    assert "live workers: 1\n" in shown()[0]


def test_deliveries_that_live_workers_did_not_run_are_summed_by_reason() -> None:
    OutboxWorker.objects.create(id=uuid4(), refused={"duplicate": 2, "unreadable": 1})
    OutboxWorker.objects.create(id=uuid4(), refused={"duplicate": 3})
    OutboxWorker.objects.create(id=uuid4(), refused={"duplicate": 9}, stopped_at=ago(seconds=1))
    assert as_json()["refused"] == {"duplicate": 5, "unreadable": 1}
    assert "that they did not run: duplicate 5, unreadable 1\n" in shown()[0]


def test_it_takes_the_same_few_queries_however_many_entries(
    django_assert_num_queries: DjangoAssertNumQueries,
) -> None:
    for state in State:
        make_entries(20, state, queue=f"of {state}")
    # The time, open entries, ended ones by state and of the last hour, queues, ticks, workers.
    with django_assert_num_queries(11):
        status.read(app, using="default")


# --- problems -----------------------------------------------------------------------------------


def test_ticks_that_have_never_run_are_late() -> None:
    assert codes() == ["dispatch_late", "reconcile_late"]


@pytest.mark.usefixtures("_ticking")
def test_a_tick_that_ran_in_the_future_is_late() -> None:
    """The database's clock was set back, and no tick has run since."""
    OutboxTick.objects.filter(name="reconcile").update(last_at=ago(hours=-1))
    assert codes() == ["reconcile_late"]
    assert " min in the future. Nobody looks for lost messages" in shown()[0]


@pytest.mark.usefixtures("_ticking")
def test_a_tick_that_stopped_is_late_and_the_way_out_is_named() -> None:
    OutboxTick.objects.filter(name="dispatch").update(last_at=ago(minutes=3))
    words, code = shown()
    assert "ran 3 min ago" in words
    assert "outbox_dispatcher" in words
    assert code == 1


@pytest.mark.usefixtures("_ticking")
@pytest.mark.parametrize("state", ["pending", "published", "running"])
def test_an_entry_owed_for_too_long_is_over_age_in_any_open_state(state: str) -> None:
    make_entry(state, due_at=ago(seconds=299))
    assert codes() == []
    make_entry(state, due_at=ago(seconds=301))
    assert codes() == ["over_age"]


@pytest.mark.usefixtures("_ticking")
def test_age_counts_from_the_first_due_time_so_that_backoffs_are_old_and_countdowns_are_not() -> (
    None
):
    make_entry(created_at=ago(days=1), due_at=ago(seconds=-60), available_at=ago(seconds=-60))
    assert codes() == []
    make_entry(due_at=ago(days=1), available_at=ago(seconds=-60))
    assert codes() == ["over_age"]


@pytest.mark.usefixtures("_ticking")
def test_a_tasks_own_over_age_goes_before_the_setting() -> None:
    make_entry(due_at=ago(hours=1), options={"over_age": 7200})
    assert codes() == []
    make_entry(due_at=ago(seconds=5), options={"over_age": 2.5})
    assert codes() == ["over_age"]


@pytest.mark.usefixtures("_ticking")
def test_an_uncertain_entry_waits_for_a_person_and_may_be_over_age_as_well() -> None:
    entry = make_entry(State.UNCERTAIN)
    assert codes() == ["waiting_for_person"]
    OutboxEntry.objects.filter(pk=entry.pk).update(due_at=ago(days=1))
    assert codes() == ["over_age", "waiting_for_person"]


def test_what_waits_for_a_person_says_since_when_it_does() -> None:
    assert as_json()["oldest_uncertain_seconds"] is None
    resolved_before, later = make_entries(2, State.UNCERTAIN, due_at=ago(days=1))
    parked(resolved_before, when=ago(hours=9))
    parked(resolved_before, when=ago(minutes=30))
    parked(later, when=ago(minutes=20))
    parked(make_entry(State.FAILED), when=ago(days=3))
    found = as_json()
    assert 1800 <= found["oldest_uncertain_seconds"] < 1900
    assert "2 entries wait for a person, the oldest for 30 min" in str(found["problems"])
    assert "oldest uncertain:  30 min" in shown()[0]


def living_worker(*queues: str, **columns: Any) -> OutboxWorker:
    return OutboxWorker.objects.create(queues=list(queues), heartbeat_at=ago(seconds=0), **columns)


@pytest.mark.usefixtures("_ticking")
@pytest.mark.parametrize("state", [State.PENDING, State.PUBLISHED])
def test_a_queue_in_which_entries_wait_and_no_live_worker_takes_them_is_a_problem(
    state: State,
) -> None:
    waiting = {"available_at": ago(seconds=60), "published_at": ago(seconds=60)}
    make_entry(state, queue="mail", **waiting)
    living_worker("celery")
    living_worker("mail", stopped_at=ago(seconds=1))
    assert codes() == ["queue_without_consumer"]
    living_worker("mail", "other")
    assert codes() == []


@pytest.mark.usefixtures("_ticking")
def test_a_queue_without_a_consumer_is_none_where_nothing_waits_for_one_or_nobody_knows() -> None:
    waiting = {"available_at": ago(seconds=60), "published_at": ago(seconds=60)}
    entry = make_entry(State.PUBLISHED, queue="mail", **waiting)
    assert codes() == []  # no worker has ever said what it consumes
    living_worker("celery")
    for harmless in (
        {"published_at": ago(seconds=0)},  # a worker that restarts is back within a lease
        {"status": State.PENDING, "options": {"consumer": "external"}},  # whose workers do not say
        {"status": State.PENDING, "options": {}, "available_at": ago(seconds=-60)},
    ):
        OutboxEntry.objects.filter(pk=entry.pk).update(**harmless)
        assert codes() == [], harmless


@pytest.mark.usefixtures("_ticking")
def test_a_failure_is_a_problem_for_an_hour() -> None:
    make_entry(State.FAILED, finished_at=ago(minutes=61))
    assert codes() == []
    make_entry(State.FAILED, finished_at=ago(minutes=59))
    assert codes() == ["failed_lately"]


@pytest.mark.usefixtures("_ticking")
def test_an_expired_lease_is_a_problem_once_a_sweep_should_have_seen_it() -> None:
    make_entry(State.RUNNING, lease_until=ago(seconds=1))
    assert codes() == []
    make_entry(State.RUNNING, lease_until=ago(seconds=3))
    assert codes() == ["lease_expired"]


@pytest.mark.usefixtures("_ticking")
def test_what_is_paused_is_named_with_who_paused_it(settings: Settings) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "PAUSED": True}
    OutboxQueue.objects.create(name="mail", paused=True, paused_by="user:ada")
    OutboxQueue.objects.create(name="celery", paused=False)
    assert codes() == ["paused", "queue_paused"]
    assert "mail was paused by user:ada" in shown()[0]


@pytest.mark.usefixtures("_ticking")
@pytest.mark.parametrize("finding", ["broker", "skipped"])
def test_what_the_last_pass_could_not_read_of_the_broker_is_a_problem(finding: str) -> None:
    OutboxTick.objects.filter(name="reconcile").update(findings={finding: "It said WRONGTYPE."})
    assert codes() == ["broker_unread"]
    assert "It said WRONGTYPE." in shown()[0]
    OutboxTick.objects.filter(name="reconcile").update(findings={finding: ""})
    assert codes() == []


@pytest.fixture(params=["refused", "silent"])
def dead_broker(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a broker that is not there, or takes connections and says nothing."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        if request.param == "refused":
            listener.close()
        yield url


@pytest.mark.usefixtures("_ticking")
def test_a_broker_that_does_not_answer_is_a_problem_and_asked_for_a_short_time(
    dead_broker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.conf, "broker_url", dead_broker)
    monkeypatch.setattr(app.conf, "broker_write_url", dead_broker)
    start = time.monotonic()
    assert codes() == ["broker_unreachable"]
    assert time.monotonic() - start < 5


# --- a database that cannot be asked ------------------------------------------------------------


def test_a_database_that_is_away_is_one_sentence_and_not_healthy() -> None:
    environment = {**os.environ, "DATABASE_URL": "postgres://postgres@127.0.0.1:1/outbox"}
    run = subprocess.run(
        [sys.executable, "manage.py", "outbox_status"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr.startswith("CommandError: The database 'default' cannot be reached")
    assert len(run.stderr.splitlines()) == 1


def test_an_unknown_database_is_one_sentence() -> None:
    with pytest.raises(CommandError, match="DATABASES has no 'nowhere'"):
        call_command("outbox_status", "--database", "nowhere")

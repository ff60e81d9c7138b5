"""What follows an end is owed by that end: links, errbacks and chains, whatever ended the entry."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis
from celery import Celery, chain
from django.contrib.auth.models import Group
from django.db import transaction
from kombu.message import Message

import outbox
from outbox import maintenance, transitions
from outbox.errors import EntryFailed, NotFollowed
from outbox.events import Note
from outbox.lifecycle import finish, follow, lease, prune
from outbox.lifecycle.claim import Claim, take
from outbox.lifecycle.publish import dispatch, render
from outbox.lifecycle.raised import as_stored
from outbox.models import OutboxEntry
from outbox.states import State
from outbox.tasks import follow_end
from outbox.transitions import FOLLOW, Ending, Kind
from outbox.worker.request import OutboxRequest
from tests import tasks
from tests.factories import ago, begin_effect, in_reach_for_long, make_entry, reread
from tests.following import APP, ended, entry_of, hint_of
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
    "an error": (lambda _: tasks.failing.s(7), {}, "ValueError(7)"),
    "the retry budget": (
        lambda folder: tasks.flaky.s(str(folder / "tries")), {}, "Passing('attempt 3')"
    ),
    "the retry deadline": (lambda _: tasks.hopeless.s(), {}, "Passing('no')"),
    "Reject": (lambda _: tasks.rejecting.s(), {}, "TaskExited(\"Reject: ('not mine', False)\")"),
    "SystemExit": (lambda _: tasks.leaving.s("SystemExit"), {}, "SystemExit('SystemExit')"),
    "MemoryError": (lambda _: tasks.leaving.s("MemoryError"), {}, "MemoryError('MemoryError')"),
    "before_start": (lambda _: tasks.unready.s(), {}, "RuntimeError('not ready')"),
    "a killed child": (lambda _: tasks.suicidal.s(), {"crash_limit": 1}, ""),
    "the hard time limit": (
        lambda folder: tasks.limited.s(str(folder / "never")),
        {"failure_limit": 1},
        "TimeLimitExceeded(1)",
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
        error = repr(EntryFailed(entry.error))
    is_heard(entry, path, error=error)


def fail_now(entry: OutboxEntry, *, note: Note = NOTE) -> Ending:
    assert entry.claim_token is not None
    return transitions.fail(entry.pk, token=entry.claim_token, note=note, using=USING)


RUNNING: dict[str, Any] = {
    "status": State.RUNNING,
    "attempts": 1,
    "crash_limit": 1,
    "started_at": ago(minutes=2),
    "claim_token": "01a22ee2-4918-4c0a-81a3-7e20a88c6778",
    "lease_owner": "01a22ee2-4918-4c0a-81a3-7e20a88c6778",
}
# Ends without a run of this worker, each by the part of the outbox that sees to it.
WITHOUT_RUN: dict[str, dict[str, Any]] = {
    "its lease ran out": {**RUNNING, "lease_until": ago(minutes=1)},
    "it expired at": {"expires_at": ago(minutes=1)},
    "its retry deadline was": {"deadline_at": ago(minutes=1)},
    "it cannot be rendered": {"kwargs": ["no object"]},
}


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("error", WITHOUT_RUN)
def test_errbacks_happen_once_where_no_run_ended_it(tmp_path: Path, error: str) -> None:
    path = tmp_path / "heard"
    in_reach_for_long()
    options = {"errbacks": errbacks(path)}
    row = {"status": State.PENDING, **WITHOUT_RUN[error]}
    entry = make_entry(row.pop("status"), options=options, owner="tests", **row)
    wait_until(lambda: maintenance.dispatch(APP, using=USING) and reread(entry).is_final)
    failed = reread(entry)
    assert failed.error.startswith(error)
    is_heard(entry, path, error=repr(EntryFailed(failed.error)))


def test_an_end_that_is_rolled_back_owes_nothing_and_a_repeated_one_no_more() -> None:
    entry = make_entry(State.RUNNING, options={"errbacks": CALLED}, queue="far", subject="a:1")
    with transaction.atomic():
        fail_now(entry)
        assert len(owed()) == 1
        transaction.set_rollback(True)
    assert (owed(), reread(entry).status) == ([], State.RUNNING)
    assert [fail_now(entry) for _ in range(2)] == [Ending.RECORDED, Ending.REPEATED]
    (row,) = owed()
    assert (row.queue, row.subject, row.owner, row.parent_id) == ("far", "a:1", "", entry.pk)
    assert (row.args, row.kwargs) == ([str(entry.pk), "errbacks", 0, USING], {})


def test_a_success_whose_reply_was_lost_is_followed_once() -> None:
    links = {"callbacks": [tasks.add.s(1)], "chain": [tasks.add.s(3), tasks.add.s(2)]}
    entry = make_entry(State.PUBLISHED, options=links)
    claim = take(tasks.add, entry.pk, [], {}, using=USING, stopping=lambda: False)
    assert isinstance(claim, Claim)
    endings = []
    for _ in range(2):
        tasks.add.push_request(**links)
        endings.append(finish.succeed(tasks.add, claim, 5))
        assert (tasks.add.request.callbacks, tasks.add.request.chain) == (None, None)
        tasks.add.pop_request()
    assert endings == [Ending.RECORDED, Ending.REPEATED]
    rows = OutboxEntry.objects.filter(parent_id=entry.pk).order_by("pk")
    assert [row.args for row in rows] == [[5, 1], [5, 2]]
    assert owed() == []


def test_an_end_that_is_no_failure_owes_no_errback() -> None:
    entry = make_entry(State.RUNNING, options={"errbacks": CALLED})
    transitions.park(entry.pk, token=entry.claim_token, note=NOTE, using=USING)  # type: ignore[arg-type]
    assert outbox.resolve(entry.pk, happened=False, actor="ann")
    assert outbox.cancel(entry.pk, actor="ann")
    assert outbox.erase(subject="a:1", actor="ann") == 0
    assert owed() == []


def test_a_failure_that_parks_since_an_effect_is_open_owes_its_errbacks_when_it_fails() -> None:
    entry = make_entry(State.RUNNING, options={"errbacks": CALLED})
    effect = begin_effect(entry)
    fail_now(entry)
    assert (reread(entry).status, owed()) == (State.UNCERTAIN, [])
    assert outbox.resolve(entry.pk, effect=effect.name, happened=True, actor="ann")
    OutboxEntry.objects.filter(pk=entry.pk).update(expires_at=ago(minutes=1))
    assert lease.expire_late(using=USING) == 1
    assert len(owed()) == 1


@pytest.mark.parametrize("options", [[], "text", {"errbacks": None}, {"errbacks": []}, {}])
def test_a_row_with_options_of_any_kind_ends(options: Any) -> None:
    entry = make_entry(options=options, expires_at=ago(minutes=1))
    assert lease.expire_late(using=USING) == 1
    assert (reread(entry).status, owed()) == (State.FAILED, [])


@pytest.mark.parametrize("errback", ["text", {"errback": "one"}, 7, [None]])
def test_an_errback_that_is_no_signature_is_one_that_fails(errback: Any) -> None:
    make_entry(options={"errbacks": errback}, expires_at=ago(minutes=1))
    assert lease.expire_late(using=USING) == 1
    (row,) = owed()
    with pytest.raises((AttributeError, KeyError, TypeError)):
        follow_end.run(*row.args)


@pytest.mark.usefixtures("worker")
def test_a_handoff_owes_no_links_since_its_message_has_them() -> None:
    links = [dict(tasks.add.s(1))]
    options = {"consumer": "external", "callbacks": links, "chain": links, "errbacks": CALLED}
    entry = make_entry(options=options)
    assert dispatch(APP, using=USING) == 1
    assert (reread(entry).status, owed()) == (State.SUCCEEDED, [])
    body = render(hint_of(entry, options=options), using=USING)["body"]
    assert json.loads(body)[2]["callbacks"] == json.loads(json.dumps(links))


def test_what_follows_an_external_task_is_not_in_the_queue_of_the_other_code_base() -> None:
    options = {"consumer": "external", "errbacks": CALLED}
    make_entry(options=options, queue="theirs", expires_at=ago(minutes=1))
    assert lease.expire_late(using=USING) == 1
    assert owed()[0].queue == "celery"


@pytest.mark.usefixtures("worker")
def test_a_step_of_a_chain_that_fails_ends_the_chain_and_requeue_goes_on(tmp_path: Path) -> None:
    path, allowed = tmp_path / "heard", tmp_path / "allowed"
    middle = tasks.add_where_allowed.s(2, str(allowed)).set(link_error=errbacks(path))
    last = chain(tasks.add.s(1, 1), middle, tasks.add.s(100)).apply_async()
    failed = ended(last.parent)
    assert failed.status == State.FAILED
    rows = followed(failed)
    assert not [row for row in rows if row.task == "tests.tasks.add" and row.args[-1] == 100]
    assert len(path.read_text().splitlines()) == 2
    allowed.touch()
    assert outbox.requeue(failed.pk, actor="ann")
    assert ended(last).result == 104
    assert OutboxEntry.objects.filter(task="tests.tasks.add").count() == 2


@pytest.mark.usefixtures("worker")
def test_a_step_that_a_person_says_has_happened_is_followed_once() -> None:
    steps = chain(tasks.add.s(1, 1), tasks.careful_add.s(2), tasks.add.s(100))
    steps.tasks[1].link(tasks.add.s(1000))
    last = steps.apply_async()
    wait_until(lambda: _is_parked(last.parent), timeout=30)
    assert outbox.resolve(last.parent.id, happened=True, result=4, actor="ann")
    assert not outbox.resolve(last.parent.id, happened=True, result=4, actor="ann")
    parent = entry_of(last.parent)
    assert ended(last).result == 104
    rows = [row for row in followed(parent) if row.parent_id == parent.pk]
    assert sorted(row.result for row in rows if row.task != FOLLOW) == [104, 1004]
    assert {row.status for row in rows} == {State.SUCCEEDED}
    assert entry_of(last).root_id == parent.root_id


def _is_parked(result: Any) -> bool:
    dispatch(APP, using=USING)
    rows = OutboxEntry.objects.filter(pk=result.id, status=State.UNCERTAIN)
    return rows.exists()


@pytest.mark.usefixtures("worker")
def test_a_run_whose_end_is_discarded_calls_no_errback(tmp_path: Path) -> None:
    path, started, until = tmp_path / "heard", tmp_path / "started", tmp_path / "until"
    with transaction.atomic():
        result = tasks.failing_late.apply_async(
            (str(started), str(until)), link_error=errbacks(path)
        )
        OutboxEntry.objects.filter(pk=result.id).update(failure_limit=1)
    wait_until(started.exists)
    assert outbox.cancel(result.id, actor="ann")
    until.touch()
    wait_until(lambda: not entry_of(result).run_goes_on)
    ended(tasks.add.delay(1, 1))
    assert (owed(), path.exists()) == ([], False)


@pytest.mark.usefixtures("worker")
def test_a_body_sees_its_errbacks(tmp_path: Path) -> None:
    result = tasks.looking_at_errbacks.apply_async(link_error=errbacks(tmp_path / "heard"))
    assert ended(result).error == "ValueError: 3"


@pytest.mark.usefixtures("worker")
def test_an_errback_may_be_a_plain_task_or_a_chain(tmp_path: Path) -> None:
    path = tmp_path / "heard"
    steps = chain(tasks.hearing_of.si("first", str(path)), tasks.hearing_of.si("then", str(path)))
    result = tasks.failing.apply_async(link_error=[tasks.plain.si(str(path)), steps])
    followed(ended(result))
    wait_until(lambda: path.read_text().count("\n") == 3)
    assert sorted(path.read_text().splitlines()) == ["first owed", "plain", "then owed"]


def request_of(task: Any) -> OutboxRequest:
    """A delivery that carries errbacks, in a worker's main process."""
    options = {"payload": "message", "errbacks": CALLED}
    entry = make_entry(task=task.name, options=options)
    sent = render(hint_of(entry, options=options), using=USING)
    kinds = {name: sent[name] for name in ("body", "headers", "content_type", "content_encoding")}
    message = Message(**kinds, delivery_info={}, properties={}, accept={"application/json"})
    return OutboxRequest(message, app=APP, task=task)


def test_the_main_process_of_a_worker_calls_no_errback_of_an_entry() -> None:
    """Celery would, for a child that is lost, by what a message carries for a rollout."""
    assert request_of(tasks.add)._context.errbacks is None
    assert request_of(tasks.plain)._context.errbacks == CALLED


def failed_with(*errbacks: Any, **columns: Any) -> OutboxEntry:
    """An entry that has failed, and owes these."""
    entry = make_entry(State.RUNNING, options={"errbacks": list(errbacks)}, **columns)
    fail_now(entry)
    return entry


def follow_now() -> None:
    """Run the bodies of what is owed, as a worker would in its transaction."""
    for row in owed():
        with transaction.atomic():
            follow_end.run(*row.args, **row.kwargs)


@pytest.mark.usefixtures("worker")
def test_an_errback_that_no_worker_knows_is_tried_again_and_then_its_owner_is_told() -> None:
    with transaction.atomic():
        entry = failed_with(APP.signature("tests.tasks.ghost"), owner="tests")
        OutboxEntry.objects.filter(parent_id=entry.pk, task=FOLLOW).update(failure_limit=1)
    followed(entry)
    (row,) = owed()
    assert (row.status, row.failures) == (State.FAILED, 1)
    assert row.error.startswith("NotFollowed: no worker of this queue knows")
    assert row.notices.get().owner == "tests"


@pytest.mark.usefixtures("worker")
def test_a_called_errback_whose_database_goes_away_is_called_again(tmp_path: Path) -> None:
    path = tmp_path / "heard"
    errback = tasks.cut_off_once.s(str(path))
    entry = ended(tasks.failing.apply_async(link_error=[errback]))
    (row,) = followed(entry)
    assert (row.status, row.failures) == (State.SUCCEEDED, 1)
    assert path.read_text().split() == ["called", "called"]
    assert Group.objects.get().name == "called"


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("how", ["link", "chain"])
def test_what_a_worker_does_not_know_yet_is_not_lost_with_its_success(how: str) -> None:
    ghost = APP.signature("tests.tasks.ghost")
    if how == "link":
        result = tasks.echo.apply_async(link=[ghost])
    else:
        result = (tasks.echo.si() | ghost | tasks.add.s(1)).apply_async().parent.parent
    assert ended(result).status == State.SUCCEEDED
    row = wait_until(lambda: OutboxEntry.objects.filter(task=FOLLOW, failures__gt=0).first())
    assert row is not None
    assert row.status == State.PENDING  # tried again later, perhaps by a worker that knows it
    assert row.error.startswith("NotFollowed: no worker of this queue knows")
    assert row.kwargs == {"result": [[], {}]}


@pytest.mark.usefixtures("worker")
def test_a_plain_link_is_owed_by_the_end_and_gets_its_result(tmp_path: Path) -> None:
    path = tmp_path / "heard"
    entry = ended(tasks.echo.apply_async(link=tasks.plainly_told.s(str(path)), ignore_result=True))
    (row,) = followed(entry)
    assert (row.task, row.status) == (FOLLOW, State.SUCCEEDED)
    wait_until(path.exists)
    assert path.read_text() == "[[], {}]\n"


def test_what_follows_keeps_the_entry_from_being_pruned() -> None:
    entry = failed_with(tasks.hearing_once.s())
    OutboxEntry.objects.filter(pk=entry.pk).update(finished_at=ago(days=90))
    assert prune.prune(using=USING) == 0
    OutboxEntry.objects.filter(task=FOLLOW).update(status=State.CANCELLED, finished_at=ago(hours=1))
    assert prune.prune(using=USING) == 1
    assert not OutboxEntry.objects.filter(pk=entry.pk).exists()


def test_an_errback_in_a_queue_of_another_code_base_is_sent_there(valkey: redis.Redis) -> None:
    failed_with(APP.signature("their.task", queue="theirs"))
    follow_now()
    assert valkey.llen("theirs") == 1


def test_a_plain_errback_waits_for_the_broker() -> None:
    entry = failed_with(tasks.plain.si("/dev/null"))
    app = Celery("away", set_as_current=False)
    app.conf.update(broker_write_url="redis://127.0.0.1:1/0", task_publish_retry=False)
    with pytest.raises(NotFollowed, match="could not be published"):
        follow.follow(app, entry.pk, Kind.ERRBACK, 0, exception=None, told_of={}, using=USING)


def test_nothing_follows_an_entry_that_was_erased() -> None:
    failed_with(tasks.hearing_once.s(), subject="a:1")
    rows = owed()
    assert outbox.erase(subject="a:1", actor="ann") == 2
    assert [row.status for row in owed()] == [State.CANCELLED]
    assert [row.args for row in owed()] == [[]]
    with transaction.atomic():
        follow_end.run(*rows[0].args)
    assert not Group.objects.exists()


def test_what_follows_an_entry_that_is_gone_fails() -> None:
    with pytest.raises(EntryFailed, match="no longer kept"):
        follow_end.run(str(uuid4()), Kind.ERRBACK, 0, USING)


class Unkind(Exception):
    """Nothing of it can be asked."""

    @property
    def args(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "error", [SystemExit(1), Unkind(), ValueError("\x00"), ValueError("x" * 2_000_000)]
)
def test_an_exception_that_cannot_be_kept_is_left_to_the_rows_words(error: Any) -> None:
    assert as_stored(error) in ("", as_repr(error))


def as_repr(error: BaseException) -> str:
    """Of an argument that JSON has no words for, Celery keeps how it looks."""
    names = {"exc_type": "ValueError", "exc_module": "builtins"}
    return json.dumps({**names, "exc_message": [repr("\x00")]})


class Refused(Exception):
    """Of a class that is only in its worker, and says more than a text."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(code, words)
        self.code = code


def test_an_errback_gets_the_exception_itself() -> None:
    stored = json.loads(as_stored(Refused(7, "no")))
    error = follow._error(APP, make_entry(State.FAILED), stored)
    assert isinstance(error, Refused)
    assert error.code == 7


@pytest.mark.parametrize(
    "stored",
    [
        {"exc_type": "system", "exc_module": "os", "exc_message": ["touch forged"]},
        {"exc_type": "SystemExit", "exc_module": "builtins", "exc_message": [1]},
        {"exc_message": "nameless"},
        "text",
        7,
        None,
    ],
)
def test_what_is_stored_makes_exceptions_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    error = follow._error(APP, make_entry(State.FAILED), stored)
    assert (type(error).__name__, str(error)) == ("ValueError", "no")
    assert not (tmp_path / "forged").exists()


def test_an_errback_gets_the_request_of_the_row() -> None:
    entry = make_entry(
        State.FAILED,
        options={"headers": {"tenant": "a"}, "errbacks": CALLED},
        attempts=3,
        failures=3,
        forgiven_failures=1,
    )
    request = follow._request(entry)
    assert (request.id, request.task, request.args) == (str(entry.pk), entry.task, [1, 2])
    assert (request.retries, request.headers, request.tenant) == (2, {"tenant": "a"}, "a")
    assert (request.root_id, request.parent_id) == (str(entry.pk), None)
    assert request.errbacks == CALLED

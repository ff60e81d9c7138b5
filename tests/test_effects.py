"""The ledger: an effect outside is begun durably, performed once, and never blindly again."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import redis
from celery import shared_task
from celery.app.trace import build_tracer
from django.db import connection, transaction
from django.db.models import F

import outbox
from outbox.effects import NOT_FOUND, Found, NotPerformed, effect
from outbox.errors import (
    Cancelled,
    EffectMismatch,
    EffectUncertain,
    EffectUnderWay,
    EffectUnverified,
    MisuseError,
    PayloadError,
    UnknownQueueError,
)
from outbox.lifecycle.reconcile import reconcile
from outbox.models import OutboxEffect, OutboxEntry
from outbox.states import State
from outbox.tasks import OutboxTask
from tests import tasks
from tests.factories import PAST, at, begin_effect, make_entry, parked, reread

pytestmark = pytest.mark.django_db(transaction=True)

APP = tasks.add.app
Body = Callable[[OutboxTask], Any]


class Outside:
    """What is outside the database: each call under its key, and what it answers."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.raises: Exception | None = None
        self.meanwhile: Callable[[], object] = lambda: None

    def __call__(self, key: str) -> Any:
        self.calls.append(key)
        self.meanwhile()
        if self.raises:
            raise self.raises
        return {"number": len(self.calls)}


@pytest.fixture
def outside(valkey: redis.Redis) -> Outside:
    return Outside()


_body: list[Body] = []


@shared_task(
    base=OutboxTask,
    bind=True,
    name="tests.buying",
    owner="tests",
    autoretry_for=(OSError,),
    max_retries=2,
    default_retry_delay=0,
)
def buying(self: OutboxTask) -> Any:
    """Whatever the test says."""
    return _body[-1](self)


@shared_task(base=OutboxTask, bind=True, name="tests.buying_atomically", atomic=True)
def buying_atomically(self: OutboxTask) -> Any:
    return _body[-1](self)


def owed(task: OutboxTask = buying) -> OutboxEntry:
    return make_entry(State.PUBLISHED, task=task.name, args=[], owner="tests", failure_limit=3)


def run(entry: OutboxEntry, body: Body, *, task: OutboxTask = buying) -> OutboxEntry:
    """One delivery of it, in this process; the entry afterwards."""
    OutboxEntry.objects.filter(pk=entry.pk, status=State.PENDING).update(available_at=at(PAST))
    _body.append(body)
    try:
        task.__trace__ = build_tracer(task.name, task, app=APP)
        task.__trace__(str(entry.pk), (), {}, {})
    finally:
        _body.pop()
    return reread(entry)


def crashed(entry: OutboxEntry) -> None:
    """As if its process had died in the middle of the run that it is in."""
    freed = {"lease_owner": None, "lease_pid": None, "lease_until": None, "claim_token": None}
    OutboxEntry.objects.filter(pk=entry.pk).update(
        status=State.PENDING, crashes=F("crashes") + 1, version=F("version") + 1, **freed
    )


def begun_by_the_dead(entry: OutboxEntry, **columns: Any) -> OutboxEffect:
    """An effect that an earlier attempt has begun, whose performer is long gone."""
    long_gone = {"performer_until": at(PAST), "request": None}
    row = OutboxEffect(
        entry=entry,
        name="mail",
        key=f"{entry.pk}:mail",
        begin_token=uuid4(),
        **{**long_gone, **columns},
    )
    row.save()
    return row


def ledger(entry: OutboxEntry, name: str = "mail") -> OutboxEffect:
    return OutboxEffect.objects.get(entry=entry, name=name)


def test_an_effect_is_performed_under_its_key_and_its_result_is_kept(outside: Outside) -> None:
    entry = run(owed(), lambda self: self.effect("mail", outside))
    assert (entry.status, entry.result) == (State.SUCCEEDED, {"number": 1})
    assert outside.calls == [f"{entry.pk}:mail"]
    assert ledger(entry).result == {"number": 1}
    assert ledger(entry).done_at is not None


def test_it_is_begun_by_a_commit_of_its_own_before_it_is_performed(outside: Outside) -> None:
    seen: list[Any] = []

    def look() -> None:
        assert not connection.in_atomic_block
        seen.append(OutboxEffect.objects.values_list("done_at", "entry__status").get())

    outside.meanwhile = look
    run(owed(), lambda self: self.effect("mail", outside))
    assert seen == [(None, State.RUNNING)]


def test_a_later_attempt_gets_the_recorded_result_and_performs_nothing(outside: Outside) -> None:
    def body(self: OutboxTask) -> Any:
        found = self.effect("mail", outside)
        if not self.request.retries:
            raise OSError("after the effect")
        return found

    entry = run(owed(), body)
    assert entry.status == State.PENDING
    assert run(entry, body).result == {"number": 1}
    assert len(outside.calls) == 1


def test_the_same_name_and_request_twice_in_a_body_is_one_effect(outside: Outside) -> None:
    entry = run(owed(), lambda self: [self.effect("mail", outside, request=1) for _ in range(2)])
    assert entry.result == [{"number": 1}] * 2
    assert len(outside.calls) == 1


def test_the_same_name_twice_in_a_body_without_a_request_is_refused(outside: Outside) -> None:
    entry = run(owed(), lambda self: [self.effect("mail", outside) for _ in range(2)])
    assert entry.status == State.FAILED
    assert "'mail' was done before in this run" in entry.error
    assert len(outside.calls) == 1


@pytest.mark.parametrize("name", ["", "n" * 201, "a\x00b", "a\nb", "\ud800", None, 7])
def test_a_name_that_cannot_be_kept_or_sent_is_refused(outside: Outside, name: Any) -> None:
    entry = run(owed(), lambda self: self.effect(name, outside))
    assert entry.status == State.FAILED
    assert "An effect cannot be named" in entry.error
    with pytest.raises(MisuseError, match="cannot be named"):
        effect(name, outside)
    assert not outside.calls


@pytest.mark.parametrize("policy", ["park", "repeat"])
def test_of_two_commands_the_second_does_not_repeat_what_the_first_may_be_at(
    outside: Outside, policy: str
) -> None:
    def another() -> None:
        with pytest.raises(EffectUnderWay):
            effect("payout:7", outside, on_uncertain=policy)

    outside.meanwhile = another
    effect("payout:7", outside, on_uncertain=policy)
    assert len(outside.calls) == 1


@pytest.mark.parametrize("happened", [None, "no", 1])
def test_a_word_that_is_no_answer_is_refused(happened: Any) -> None:
    entry = make_entry(State.UNCERTAIN)
    begin_effect(entry)
    with pytest.raises(MisuseError, match="True or False"):
        outbox.resolve(entry.pk, effect="mail", happened=happened, actor="ada")
    with pytest.raises(MisuseError, match="True or False"):
        outbox.settle_effect("mail", happened=happened, actor="ada")
    assert reread(entry).status == State.UNCERTAIN


def test_a_result_that_is_too_large_to_be_said_is_refused() -> None:
    entry = make_entry(State.UNCERTAIN)
    begin_effect(entry)
    with pytest.raises(PayloadError, match="MAX_PAYLOAD_BYTES"):
        outbox.resolve(entry.pk, effect="mail", happened=True, result="x" * 300_000, actor="ada")
    assert reread(entry).status == State.UNCERTAIN


@pytest.mark.parametrize("found", [Found({"number": 7}), Found()])
def test_what_verify_finds_is_recorded_and_not_performed(outside: Outside, found: Found) -> None:
    entry = owed()
    begun_by_the_dead(entry)
    asked: list[str] = []

    def verify(key: str) -> Found:
        asked.append(key)
        return found

    ended = run(entry, lambda self: self.effect("mail", outside, verify=verify))
    assert (ended.status, ended.result) == (State.SUCCEEDED, found.result)
    assert (outside.calls, asked) == ([], [f"{entry.pk}:mail"])
    assert ledger(entry).settled_by == "verify"


def test_what_verify_does_not_find_is_performed_under_the_same_key(outside: Outside) -> None:
    entry = owed()
    before = begun_by_the_dead(entry)
    ended = run(entry, lambda self: self.effect("mail", outside, verify=lambda key: NOT_FOUND))
    assert ended.status == State.SUCCEEDED
    assert outside.calls == [before.key]
    assert ledger(entry).begin_token != before.begin_token


def test_not_found_counts_only_when_the_first_performer_has_had_its_time(outside: Outside) -> None:
    entry = owed()
    before = begun_by_the_dead(entry, performer_until=at(timedelta(seconds=60)))
    waits = run(entry, lambda self: self.effect("mail", outside, verify=lambda key: NOT_FOUND))
    assert (waits.status, waits.failures, waits.crashes, waits.releases) == ("pending", 0, 0, 1)
    assert waits.available_at == before.performer_until
    assert outside.calls == []


def test_where_verify_cannot_say_it_is_tried_later_and_a_person_is_asked_in_the_end(
    outside: Outside,
) -> None:
    entry = owed()
    begun_by_the_dead(entry)

    def verify(key: str) -> Found:
        raise ValueError("the provider is away")

    def body(self: OutboxTask) -> Any:
        return self.effect("mail", outside, verify=verify)

    for failures in (1, 2):
        entry = run(entry, body)
        assert (entry.status, entry.failures) == (State.PENDING, failures)
    assert run(entry, body).status == State.UNCERTAIN
    assert "the provider is away" in reread(entry).error
    assert outside.calls == []


def test_an_answer_that_verify_cannot_give_is_misuse(outside: Outside) -> None:
    entry = owed()
    begun_by_the_dead(entry)
    wrong: Any = lambda key: True  # noqa: E731
    assert run(entry, lambda self: self.effect("mail", outside, verify=wrong)).status == "uncertain"
    assert "verify returned True" in reread(entry).error


def test_it_is_repeated_under_its_key_where_that_is_asked_for(outside: Outside) -> None:
    entry = owed()
    before = begun_by_the_dead(entry, performer_until=at(timedelta(seconds=60)))
    ended = run(entry, lambda self: self.effect("mail", outside, on_uncertain="repeat"))
    assert ended.status == State.SUCCEEDED
    assert outside.calls == [before.key]
    assert ledger(entry).first_begun_at == before.first_begun_at


def test_it_is_not_repeated_once_the_receiving_side_may_have_forgotten_the_key(
    outside: Outside,
) -> None:
    entry = owed()
    begun_by_the_dead(entry, first_begun_at=at(timedelta(seconds=-11)))

    def body(self: OutboxTask) -> Any:
        return self.effect("mail", outside, on_uncertain="repeat", repeat_within=10)

    assert run(entry, body).status == State.UNCERTAIN
    assert outside.calls == []


def test_else_a_person_is_asked_and_the_owner_is_told(outside: Outside) -> None:
    entry = owed()
    begun_by_the_dead(entry)
    parked = run(entry, lambda self: self.effect("mail", outside))
    assert parked.status == State.UNCERTAIN
    assert outside.calls == []
    event = parked.events.get()
    assert (event.verb, event.actor) == ("park", "worker")
    assert OutboxEntry.objects.get(task="outbox.tell_owner").args == ["tests", "default"]
    assert parked.notices.get().about == "uncertain"


@pytest.mark.parametrize(("happened", "calls"), [(True, 0), (False, 1)])
def test_the_body_runs_on_past_what_a_person_has_resolved(
    outside: Outside, happened: bool, calls: int
) -> None:
    entry = owed()
    begun_by_the_dead(entry)
    others: list[str] = []

    def body(self: OutboxTask) -> Any:
        mail = self.effect("mail", outside)
        return [mail, self.effect("invoice", lambda key: others.append(key))]

    run(entry, body)
    assert others == []
    assert not outbox.resolve(entry.pk, effect="invoice", happened=True, actor="alice")
    assert outbox.resolve(entry.pk, effect="mail", happened=happened, result=5, actor="alice")
    ended = run(entry, body)
    assert ended.status == State.SUCCEEDED
    assert ended.result == [5 if happened else {"number": 1}, None]
    assert (len(outside.calls), len(others)) == (calls, 1)


def test_an_error_in_the_call_leaves_its_outcome_unknown(outside: Outside) -> None:
    outside.raises = OSError("timed out")
    parked = run(owed(), lambda self: self.effect("mail", outside))
    assert (parked.status, parked.failures) == (State.UNCERTAIN, 0)
    assert "timed out" in parked.error
    assert ledger(parked).done_at is None


def test_where_it_may_be_repeated_an_error_in_the_call_is_a_failure_like_any_other(
    outside: Outside,
) -> None:
    def body(self: OutboxTask) -> Any:
        return self.effect("mail", outside, on_uncertain="repeat")

    outside.raises = OSError("timed out")
    entry = run(owed(), body)
    assert (entry.status, entry.failures) == (State.PENDING, 1)
    outside.raises = None
    assert run(entry, body).status == State.SUCCEEDED
    assert outside.calls == [f"{entry.pk}:mail"] * 2


def test_at_the_end_of_its_budget_a_begun_effect_parks_and_never_fails(outside: Outside) -> None:
    outside.raises = OSError("timed out")
    entry = owed()
    for _ in range(3):
        entry = run(entry, lambda self: self.effect("mail", outside, on_uncertain="repeat"))
    assert (entry.status, entry.failures) == (State.UNCERTAIN, 3)


def test_what_has_certainly_not_happened_is_tried_again_as_if_never_begun(
    outside: Outside,
) -> None:
    def refused(key: str) -> None:
        try:
            raise OSError("no such mailbox")
        except OSError as error:
            raise NotPerformed from error

    entry = run(owed(), lambda self: self.effect("mail", refused))
    assert (entry.status, entry.failures) == (State.PENDING, 1)
    assert ledger(entry).cleared_at is not None
    assert run(entry, lambda self: self.effect("mail", outside)).status == State.SUCCEEDED
    assert ledger(entry).cleared_at is None


def test_what_was_never_performed_fails_at_the_end_of_its_budget(outside: Outside) -> None:
    def refused(key: str) -> None:
        raise NotPerformed("no such mailbox") from OSError("no such mailbox")

    entry = owed()
    for _ in range(3):
        entry = run(entry, lambda self: self.effect("mail", refused))
    assert (entry.status, entry.failures) == (State.FAILED, 3)


def test_a_late_run_begins_nothing(outside: Outside) -> None:
    caught: list[BaseException] = []

    def body(self: OutboxTask) -> Any:
        crashed(entry)
        with pytest.raises(Cancelled) as raised:
            self.effect("mail", outside)
        caught.append(raised.value)
        raise raised.value

    entry = owed()
    run(entry, body)
    assert len(caught) == 1
    assert outside.calls == []
    assert not OutboxEffect.objects.exists()


def test_a_cancelled_run_begins_nothing(outside: Outside) -> None:
    def body(self: OutboxTask) -> Any:
        outbox.cancel(entry.pk, actor="alice")
        return self.effect("mail", outside)

    entry = owed()
    ended = run(entry, body)
    assert (ended.status, ended.lease_owner) == (State.CANCELLED, None)
    assert outside.calls == []
    assert not OutboxEffect.objects.exists()


def test_a_late_worker_whose_call_succeeded_tells_the_truth(outside: Outside) -> None:
    entry = owed()
    outside.meanwhile = lambda: crashed(entry)
    after = run(entry, lambda self: self.effect("mail", outside))
    assert after.status == State.PENDING
    assert ledger(entry).done_at is not None
    ended = run(entry, lambda self: self.effect("mail", outside))
    assert (ended.status, ended.result) == (State.SUCCEEDED, {"number": 1})
    assert len(outside.calls) == 1


def test_who_performed_it_knows_better_than_a_person(outside: Outside) -> None:
    def person() -> None:
        OutboxEffect.objects.update(cleared_at=at(), settled_by="alice")

    outside.meanwhile = person
    entry = run(owed(), lambda self: self.effect("mail", outside))
    row = ledger(entry)
    assert row.done_at is not None
    assert (row.cleared_at, row.settled_by) == (None, "performer")


def test_a_late_word_about_what_was_begun_anew_changes_nothing(outside: Outside) -> None:
    token = uuid4()
    outside.meanwhile = lambda: OutboxEffect.objects.update(begin_token=token)
    entry = run(owed(), lambda self: self.effect("mail", outside))
    assert (ledger(entry).begin_token, ledger(entry).done_at) == (token, None)


def test_the_same_name_with_another_request_is_an_error_and_no_second_effect(
    outside: Outside,
) -> None:
    def body(self: OutboxTask) -> Any:
        self.effect("mail", outside, request={"to": "a"})
        with pytest.raises(EffectMismatch, match="a name of its own"):
            self.effect("mail", outside, request={"to": "b"})
        return self.effect("mail", outside, request={"to": "a"})

    assert run(owed(), body).status == State.SUCCEEDED
    assert len(outside.calls) == 1


def test_a_body_that_swallows_the_doubt_has_not_succeeded(outside: Outside) -> None:
    entry = owed()
    begun_by_the_dead(entry)

    def body(self: OutboxTask) -> str:
        with pytest.raises(EffectUncertain):
            self.effect("mail", outside)
        return "fine"

    assert run(entry, body).status == State.UNCERTAIN


def test_inside_a_transaction_it_is_refused(outside: Outside) -> None:
    def body(self: OutboxTask) -> Any:
        with transaction.atomic():
            return self.effect("mail", outside)

    assert run(owed(), body).status == State.FAILED
    atomic = owed(buying_atomically)
    ended = run(atomic, lambda self: self.effect("mail", outside), task=buying_atomically)
    assert "commit of its own" in ended.error
    assert outside.calls == []


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"on_uncertain": "ask"}, MisuseError),
        ({"timeout": 0}, MisuseError),
        ({"timeout": "soon"}, MisuseError),
        ({"request": {1, 2}}, PayloadError),
        ({"request": float("nan")}, PayloadError),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_begun(
    outside: Outside, wrong: dict[str, Any], error: type[Exception]
) -> None:
    def body(self: OutboxTask) -> None:
        with pytest.raises(error):
            self.effect("mail", outside, **wrong)

    run(owed(), body)
    assert outside.calls == []
    assert not OutboxEffect.objects.exists()


def test_a_result_that_cannot_be_stored_is_left_out(outside: Outside) -> None:
    entry = run(owed(), lambda self: self.effect("mail", lambda key: object()))
    assert (entry.status, entry.result) == (State.SUCCEEDED, None)
    assert ledger(entry).done_at is not None


def test_called_plainly_it_performs_and_keeps_no_ledger(outside: Outside) -> None:
    _body.append(lambda self: self.effect("mail", outside))
    assert buying.apply().get() == {"number": 1}
    _body.pop()
    assert not OutboxEffect.objects.exists()


@pytest.mark.parametrize(
    "error",
    [
        Cancelled("its run is over"),
        EffectUncertain("nobody knows", key="k"),
        EffectUnderWay("k", until=at()),
        PayloadError("too large", task="t"),
        UnknownQueueError("no such queue", queue="q"),
    ],
)
def test_an_error_survives_the_way_from_a_pools_child_to_its_worker(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


# --- outside a task -----------------------------------------------------------------------------


def test_a_command_has_effects_under_keys_of_its_own(outside: Outside) -> None:
    assert effect("payout:7", outside) == {"number": 1}
    assert effect("payout:7", outside) == {"number": 1}
    assert outside.calls == ["payout:7"]


def test_a_command_that_died_in_the_middle_leaves_the_question_to_a_person(
    outside: Outside,
) -> None:
    outside.raises = OSError("timed out")
    with pytest.raises(EffectUncertain, match="timed out"):
        effect("payout:7", outside)
    OutboxEffect.objects.update(performer_until=at(PAST))
    with pytest.raises(EffectUncertain, match="nobody can be asked"):
        effect("payout:7", outside)
    assert outbox.settle_effect("payout:7", happened=True, result=3, actor="alice")
    assert not outbox.settle_effect("payout:7", happened=False, actor="bob")
    assert effect("payout:7", outside) == 3
    assert len(outside.calls) == 1


def test_a_command_cannot_take_the_key_of_an_entry(outside: Outside) -> None:
    entry = owed()
    with pytest.raises(MisuseError, match="a key of your own"):
        effect(f"{entry.pk}:mail", outside)
    assert effect(str(uuid4()), outside) == {"number": 1}


def test_two_commands_at_once_do_not_perform_it_twice(outside: Outside) -> None:
    def another() -> None:
        with pytest.raises(EffectUnderWay):
            effect("payout:7", outside, verify=lambda key: NOT_FOUND)

    outside.meanwhile = another
    assert effect("payout:7", outside) == {"number": 1}
    assert len(outside.calls) == 1


def test_a_command_hears_why_verify_could_not_say(outside: Outside) -> None:
    def verify(key: str) -> Found:
        raise OSError("away")

    OutboxEffect(name="p", key="p", begin_token=uuid4(), performer_until=at(PAST)).save()
    with pytest.raises(EffectUnverified, match="away"):
        effect("p", outside, verify=verify)
    assert outside.calls == []


def uncertain_and_late(*, before: timedelta = timedelta(), **columns: Any) -> OutboxEntry:
    """Parked a minute ago for an effect that its performer has recorded since, or before that."""
    entry = make_entry(State.UNCERTAIN, task=buying.name, args=[], **columns)
    parked(entry)
    begun_by_the_dead(entry, done_at=at(-before), result={"number": 7})
    return entry


def answered() -> int:
    found = reconcile(APP, using="default")
    assert not found.failed
    return found.answered


def test_nobody_is_asked_any_more_once_who_performed_it_has_told(outside: Outside) -> None:
    entry = uncertain_and_late()
    assert answered() == 1
    assert reread(entry).status == State.PENDING
    assert entry.events.latest("id").actor == "reconcile"
    ended = run(entry, lambda self: self.effect("mail", outside))
    assert (ended.status, ended.result, outside.calls) == (State.SUCCEEDED, {"number": 7}, [])


def test_a_dry_look_says_what_was_answered_and_changes_nothing() -> None:
    entry = uncertain_and_late()
    assert reconcile(APP, using="default", dry=True).answered == 1
    assert reread(entry).status == State.UNCERTAIN


def test_a_person_is_still_asked_about_another_effect_or_after_a_crash() -> None:
    another = uncertain_and_late()
    begin_effect(another, "second")
    uncertain_and_late(options={"on_crash": "park"})
    uncertain_and_late(before=timedelta(hours=1))  # known before it was parked for something else
    make_entry(State.UNCERTAIN)
    assert answered() == 0
    assert set(OutboxEntry.objects.values_list("status", flat=True)) == {State.UNCERTAIN}


def test_a_late_worker_answers_the_question_that_was_asked_meanwhile(outside: Outside) -> None:
    entry = owed()

    def meanwhile() -> None:
        outside.meanwhile = lambda: None
        crashed(entry)
        asked = run(entry, lambda self: self.effect("mail", outside))
        assert asked.status == State.UNCERTAIN

    outside.meanwhile = meanwhile
    run(entry, lambda self: self.effect("mail", outside))
    assert ledger(entry).done_at is not None
    assert answered() == 1
    ended = run(entry, lambda self: self.effect("mail", outside))
    assert (ended.status, len(outside.calls)) == (State.SUCCEEDED, 1)

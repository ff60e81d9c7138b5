"""Every verb in every state does what the table of edges says, and nothing else."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from outbox import transitions
from outbox.events import Note
from outbox.lifecycle import finish, operate
from outbox.lifecycle.claim import Claim, take
from outbox.models import OutboxEntry
from outbox.states import EDGES, FINAL, State, Verb
from outbox.transitions import Ending, Holder
from tests import tasks
from tests.factories import AHEAD, PAST, at, begin_effect, make_entry, reread

pytestmark = pytest.mark.django_db(transaction=True)

USING = "default"
NOTE = Note("tests", "because", error="ValueError: no", traceback="Traceback …")
QUICK = timedelta()


def token(entry: OutboxEntry) -> Any:
    return entry.claim_token or uuid4()


def claim(entry: OutboxEntry, **more: Any) -> Any:
    given = {"token": uuid4(), "owner": uuid4(), "pid": 1, "lease": 30.0, "synced": False}
    return transitions.claim(entry.pk, task=entry.task, using=USING, **{**given, **more})


def holder(entry: OutboxEntry) -> Holder:
    return Holder(token=token(entry))


def recovered(entry: OutboxEntry, act: Callable[[OutboxEntry], Any]) -> Any:
    with transitions.recovering(OutboxEntry.objects.filter(pk=entry.pk), limit=1) as rows:
        return [act(row) for row in rows]


# How each verb is tried on an entry; the guards other than the state are met.
TRY: Mapping[Verb, Callable[[OutboxEntry], Any]] = {
    Verb.PUBLISH: lambda e: transitions.publish([(e.pk, e.version)], using=USING),
    Verb.HANDOFF: lambda e: recovered(e, transitions.hand_off),
    Verb.REJECT: lambda e: recovered(e, lambda row: transitions.reject(row, note=NOTE)),
    Verb.CLAIM: claim,
    Verb.RENEW: lambda e: transitions.renew(
        [e.pk], owner=e.lease_owner or uuid4(), lease=99, using=USING
    ),
    Verb.SUCCEED: lambda e: transitions.succeed(
        e.pk, token=token(e), result="1", task=e.task, owner="", using=USING
    ),
    Verb.RETRY: lambda e: transitions.retry(
        e.pk, token=token(e), delay=QUICK, note=NOTE, changes={}, using=USING
    ),
    Verb.FAIL: lambda e: transitions.fail(e.pk, token=token(e), note=NOTE, using=USING),
    Verb.PARK: lambda e: transitions.park(e.pk, token=token(e), note=NOTE, using=USING),
    Verb.TIMEOUT: lambda e: transitions.time_out(
        e.pk, holder=holder(e), delay=QUICK, budget=None, note=NOTE, using=USING
    ),
    Verb.RELEASE: lambda e: transitions.release(e.pk, holder=holder(e), note=NOTE, using=USING),
    Verb.DECLINE: lambda e: transitions.decline(e.pk, delay=QUICK, note=NOTE, using=USING),
    Verb.CRASH: lambda e: recovered(
        e, lambda row: transitions.crash(row, delay=QUICK, limit=3, on_crash="retry", note=NOTE)
    ),
    Verb.SETTLE: lambda e: transitions.settle(e.pk, holder=holder(e), note=NOTE, using=USING),
    Verb.STRAND: lambda e: recovered(e, lambda row: transitions.strand(row, note=NOTE)),
    Verb.EXPIRE: lambda e: recovered(e, lambda row: transitions.expire(row, note=NOTE)),
    Verb.CANCEL: lambda e: transitions.cancel(e.pk, note=NOTE, using=USING),
    Verb.RESOLVE: lambda e: transitions.resolve(
        e.pk, effect=None, happened=True, result=None, note=NOTE, using=USING
    ),
    Verb.REQUEUE: lambda e: transitions.requeue(e.pk, note=NOTE, crash_budget=3, using=USING),
    Verb.RUN_NOW: lambda e: transitions.run_now(e.pk, note=NOTE, using=USING),
    Verb.ERASE: lambda e: transitions.erase(e.pk, note=NOTE, using=USING),
}

# States in which a second guard refuses although the edge names them: tested by name below.
GUARDED = {
    (Verb.CLAIM, State.RUNNING),  # only with the delivery's own token
    (Verb.RENEW, State.CANCELLED),  # only while its run goes on
    (Verb.SETTLE, State.CANCELLED),  # likewise
}


def test_every_verb_but_enqueue_is_in_the_matrix() -> None:
    assert set(TRY) == set(EDGES) - {Verb.ENQUEUE}


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("verb", TRY)
def test_a_verb_moves_an_entry_only_along_its_edge(verb: Verb, state: State) -> None:
    before = make_entry(state)
    TRY[verb](before)
    after = reread(before)
    edge = EDGES[verb]
    if state in edge.sources and (verb, state) not in GUARDED:
        assert after.version == before.version + 1
        assert State(after.status) in edge.targets
    else:
        assert (after.version, after.status) == (before.version, before.status)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("verb", TRY)
def test_a_step_off_the_happy_path_leaves_one_event_with_its_actor(
    verb: Verb, state: State
) -> None:
    entry = make_entry(state)
    TRY[verb](entry)
    moved = reread(entry).version > entry.version
    events = entry.events.filter(verb=verb.value)
    assert events.count() == (1 if moved and not EDGES[verb].quiet else 0)
    for event in events:
        assert event.actor == "tests" or verb is Verb.HANDOFF
        assert (event.from_status, event.to_status) == (state, reread(entry).status)


def test_the_same_token_claims_again_without_a_second_attempt() -> None:
    entry, delivery = make_entry(State.PUBLISHED), uuid4()
    first, again = (claim(entry, token=delivery) for _ in range(2))
    assert first["attempts"] == again["attempts"] == 1
    assert claim(entry, token=uuid4()) is None


def test_a_claim_of_another_task_name_takes_nothing() -> None:
    entry = make_entry(State.PUBLISHED)
    values: Any = {"token": uuid4(), "owner": uuid4(), "pid": 1, "lease": 30.0, "synced": True}
    assert transitions.claim(entry.pk, task="shop.other", using=USING, **values) is None


def test_an_early_redelivery_does_not_defeat_the_backoff() -> None:
    entry = make_entry(State.PENDING, available_at=at(AHEAD))
    assert claim(entry) is None
    assert reread(entry).attempts == 0


@pytest.mark.parametrize("column", ["expires_at", "deadline_at"])
def test_nothing_is_claimed_past_its_expiry_or_deadline(column: str) -> None:
    assert claim(make_entry(State.PUBLISHED, **{column: at(PAST)})) is None


@pytest.mark.parametrize(
    "verb", [Verb.SUCCEED, Verb.RETRY, Verb.FAIL, Verb.PARK, Verb.RELEASE, Verb.SETTLE]
)
def test_a_worker_with_another_token_writes_nothing(verb: Verb) -> None:
    entry = make_entry(State.RUNNING)
    stranger = reread(entry)
    stranger.claim_token = uuid4()
    TRY[verb](stranger)
    assert reread(entry).version == entry.version


def test_a_late_result_is_discarded_with_an_event() -> None:
    entry = make_entry(State.RUNNING)
    stranger = reread(entry)
    stranger.claim_token = uuid4()
    assert TRY[Verb.SUCCEED](stranger) is Ending.REFUSED
    assert list(entry.events.values_list("verb", flat=True)) == ["late"]


@pytest.mark.parametrize("verb", [Verb.SUCCEED, Verb.RETRY, Verb.FAIL, Verb.PARK])
def test_repeating_an_ending_whose_reply_was_lost_is_a_success(verb: Verb) -> None:
    entry = make_entry(State.RUNNING)
    assert TRY[verb](entry) is Ending.RECORDED
    once = reread(entry)
    assert TRY[verb](entry) is Ending.REPEATED
    assert reread(entry).version == once.version


@pytest.mark.parametrize("verb", [Verb.SUCCEED, Verb.RETRY, Verb.FAIL])
def test_a_cancelled_entry_stays_cancelled_whatever_its_run_does(verb: Verb) -> None:
    entry = make_entry(State.RUNNING)
    assert TRY[Verb.CANCEL](entry)
    assert reread(entry).run_goes_on
    assert TRY[verb](entry) is Ending.CANCELLED
    after = reread(entry)
    assert after.status == State.CANCELLED
    assert not after.run_goes_on


def test_a_crash_takes_the_token_so_that_the_crashed_run_cannot_end() -> None:
    entry = make_entry(State.RUNNING)
    TRY[Verb.CRASH](entry)
    assert TRY[Verb.RETRY](entry) is Ending.REFUSED
    assert reread(entry).failures == 0


def test_a_renewal_extends_the_lease_also_of_a_cancelled_run() -> None:
    for state in (State.RUNNING, State.CANCELLED):
        owner = uuid4()
        entry = make_entry(state, lease_owner=owner, lease_pid=1, lease_until=at(PAST))
        assert transitions.renew([entry.pk], owner=owner, lease=60, using=USING) == {entry.pk}
        assert (reread(entry).lease_until or at(PAST)) > at()


def test_a_renewal_by_another_owner_extends_nothing() -> None:
    entry = make_entry(State.RUNNING)
    assert transitions.renew([entry.pk], owner=uuid4(), lease=60, using=USING) == set()


def test_requeue_is_refused_while_the_cancelled_run_goes_on() -> None:
    entry = make_entry(State.RUNNING)
    TRY[Verb.CANCEL](entry)
    assert TRY[Verb.REQUEUE](entry) is False
    assert TRY[Verb.SETTLE](entry) is True
    assert TRY[Verb.REQUEUE](entry) is True


def test_requeue_starts_a_new_budget_on_top_of_the_old_counts() -> None:
    entry = make_entry(State.FAILED, attempts=7, failures=4, crashes=3, failure_limit=4)
    assert TRY[Verb.REQUEUE](entry)
    after = reread(entry)
    assert (after.failures, after.crashes, after.retries) == (4, 3, 0)
    assert (after.failure_limit, after.crash_limit) == (8, 6)


def test_requeue_leaves_a_unique_key_to_the_newer_entry() -> None:
    old = make_entry(State.FAILED, options={"unique_key": "k"})
    make_entry(State.PENDING, unique_key="k")
    assert TRY[Verb.REQUEUE](old) is False
    assert reread(old).status == State.FAILED


def test_requeue_takes_its_free_unique_key_again() -> None:
    old = make_entry(State.FAILED, options={"unique_key": "k"})
    assert TRY[Verb.REQUEUE](old) is True
    assert reread(old).unique_key == "k"


@pytest.mark.parametrize("verb", [Verb.FAIL, Verb.CRASH, Verb.TIMEOUT, Verb.EXPIRE, Verb.REJECT])
def test_an_entry_with_a_begun_effect_never_fails_it_parks(verb: Verb) -> None:
    state = State.PENDING if verb in (Verb.EXPIRE, Verb.REJECT) else State.RUNNING
    entry = make_entry(state, crashes=2, failures=2, attempts=5, crash_limit=3)
    begin_effect(entry)
    if verb is Verb.TIMEOUT:
        transitions.time_out(
            entry.pk, holder=holder(entry), delay=QUICK, budget=1, note=NOTE, using=USING
        )
    else:
        TRY[verb](entry)
    assert reread(entry).status == State.UNCERTAIN


@pytest.mark.parametrize(("on_crash", "to"), [("park", State.UNCERTAIN), ("fail", State.FAILED)])
def test_a_crash_does_what_its_task_asks_for(on_crash: str, to: State) -> None:
    entry = make_entry(State.RUNNING)
    recovered(
        entry,
        lambda row: transitions.crash(row, delay=QUICK, limit=3, on_crash=on_crash, note=NOTE),
    )
    assert reread(entry).status == to


def test_the_crash_cap_turns_a_poison_pill_into_failed_and_says_so() -> None:
    entry = make_entry(State.RUNNING, attempts=3, crashes=2)
    TRY[Verb.CRASH](entry)
    after = reread(entry)
    assert (after.status, after.crashes) == (State.FAILED, 3)
    assert "crash 3 of at most 3" in after.error


def test_counters_are_kept_apart() -> None:
    entry = make_entry(State.RUNNING)
    for verb in (Verb.RETRY, Verb.CRASH, Verb.RELEASE):
        TRY[verb](reread(entry))
        claim(entry)
    after = reread(entry)
    assert (after.attempts, after.failures, after.crashes, after.releases) == (4, 1, 1, 1)


def test_resolving_one_effect_returns_the_entry_to_the_workers() -> None:
    entry = make_entry(State.UNCERTAIN)
    effect = begin_effect(entry)
    common: Any = {"result": {"id": 1}, "note": NOTE, "using": USING}
    assert not transitions.resolve(entry.pk, effect=None, happened=True, **common)
    assert not transitions.resolve(entry.pk, effect="other", happened=True, **common)
    assert transitions.resolve(entry.pk, effect="mail", happened=True, **common)
    effect.refresh_from_db()
    assert effect.done_at
    assert effect.result == {"id": 1}
    assert reread(entry).status == State.PENDING


def test_a_person_says_that_a_parked_crash_did_not_happen() -> None:
    entry = make_entry(State.UNCERTAIN)
    transitions.resolve(entry.pk, effect=None, happened=False, result=None, note=NOTE, using=USING)
    assert reread(entry).status == State.PENDING


def test_a_mark_that_comes_late_does_not_touch_the_next_life() -> None:
    entry = make_entry(State.PENDING)
    claim(entry)
    TRY[Verb.RETRY](reread(entry))
    assert transitions.publish([(entry.pk, entry.version)], using=USING) == 0
    assert reread(entry).status == State.PENDING


def test_erasing_leaves_the_counts_and_removes_the_words() -> None:
    entry = make_entry(
        State.FAILED, args=["secret"], kwargs={"a": 1}, error="secret", traceback="secret"
    )
    TRY[Verb.REQUEUE](entry)
    TRY[Verb.CANCEL](entry)
    assert TRY[Verb.ERASE](entry)
    after = reread(entry)
    assert (after.args, after.kwargs, after.error, after.traceback) == ([], {}, "", "")
    earlier = entry.events.exclude(verb="erase")
    assert set(earlier.values_list("reason", "error", "traceback")) == {("", "", "")}


def test_a_run_that_ends_after_its_entry_was_erased_writes_nothing_of_it_down() -> None:
    entry = make_entry(State.RUNNING, subject="user:42")
    assert operate.erase(subject="user:42", actor="user:ann") == 1
    note = Note("worker", error="secret", traceback="secret")
    ending = transitions.fail(entry.pk, token=token(entry), note=note, using=USING)
    assert ending is Ending.CANCELLED
    assert not reread(entry).run_goes_on
    said = entry.events.exclude(error="", traceback="", reason="")
    assert not said.exists()
    assert not TRY[Verb.REQUEUE](entry)  # nobody knows any more what is owed


def test_erasing_leaves_the_message_that_is_owed_to_the_owner() -> None:
    entry = make_entry(State.RUNNING, subject="user:42", owner="tests")
    TRY[Verb.FAIL](entry)
    assert operate.erase(subject="user:42", actor="user:ann") == 1
    assert OutboxEntry.objects.get(task="outbox.tell_owner").status == State.PENDING
    assert entry.notices.exists()


def test_a_retry_whose_reply_was_lost_is_known_again_wherever_the_entry_has_gone() -> None:
    entry = make_entry(State.RUNNING)
    assert TRY[Verb.RETRY](entry) is Ending.RECORDED
    for status in ("published", "cancelled"):
        columns: dict[str, Any] = {"published_at": at(), "finished_at": None}
        if status == "cancelled":
            columns["finished_at"] = at()
        OutboxEntry.objects.filter(pk=entry.pk).update(status=status, **columns)
        assert TRY[Verb.RETRY](entry) is Ending.REPEATED
    assert not entry.events.filter(verb="late").exists()


def test_a_retry_that_gave_up_and_whose_reply_was_lost_gave_up() -> None:
    entry = make_entry(State.RUNNING, deadline_at=at(PAST))
    assert TRY[Verb.RETRY](entry) is Ending.GAVE_UP
    assert TRY[Verb.RETRY](entry) is Ending.GAVE_UP
    assert entry.events.get().verb == "fail"


def test_a_claim_whose_reply_was_lost_is_repeated_though_the_deadline_passed_meanwhile() -> None:
    entry = make_entry(State.RUNNING, deadline_at=at(PAST), expires_at=at(PAST))
    assert entry.claim_token is not None
    found = claim(entry, token=entry.claim_token)
    assert found is not None
    assert found["attempts"] == entry.attempts


def test_a_crash_of_a_row_that_has_moved_on_answers_nothing() -> None:
    stale = make_entry(State.RUNNING)
    TRY[Verb.SUCCEED](stale)
    answer = transitions.crash(stale, delay=QUICK, limit=3, on_crash="retry", note=NOTE)
    assert answer is None


def test_pruning_deletes_only_ended_entries_that_nobody_runs() -> None:
    ended = [make_entry(state) for state in FINAL]
    TRY[Verb.REQUEUE](ended[0])
    running = make_entry(State.RUNNING)
    TRY[Verb.CANCEL](running)
    gone = transitions.prune(OutboxEntry.objects.all(), limit=99)
    left = set(OutboxEntry.objects.values_list("pk", flat=True))
    assert running.pk in left
    assert gone == 4 - len(left)


@pytest.mark.parametrize("state", [State.FAILED, State.UNCERTAIN])
def test_the_owner_is_owed_a_message_in_the_same_transaction(state: State) -> None:
    entry = make_entry(State.RUNNING, owner="tests")
    TRY[Verb.FAIL if state is State.FAILED else Verb.PARK](entry)
    told = OutboxEntry.objects.get(task="outbox.tell_owner")
    assert (told.args, told.unique_key, told.owner) == (["tests", USING], "tests", "")
    notice = entry.notices.get()
    assert (notice.owner, notice.about, notice.told_by, notice.told_at) == (
        "tests",
        state,
        None,
        None,
    )


def test_a_message_to_an_owner_has_no_owner_to_tell() -> None:
    entry = make_entry(State.RUNNING, task="outbox.tell_owner", owner="tests")
    TRY[Verb.FAIL](entry)
    assert OutboxEntry.objects.count() == 1
    assert not entry.notices.exists()


def test_erasing_a_failed_entry_tells_its_owner_nothing_again() -> None:
    entry = make_entry(State.FAILED, owner="tests")
    assert TRY[Verb.ERASE](entry)
    assert OutboxEntry.objects.count() == 1


def test_a_claim_and_its_ending_are_one_statement_each(django_assert_num_queries: Any) -> None:
    entry = make_entry(State.PUBLISHED)
    with django_assert_num_queries(1):
        found = take(tasks.add, entry.pk, (), {}, using=USING, stopping=lambda: False)
    assert isinstance(found, Claim)
    with django_assert_num_queries(1):
        assert finish.succeed(tasks.add, found, 3) is Ending.RECORDED
    assert reread(entry).result == 3

"""Over age: owed for too long in whatever open state; its owner is told once, nothing is pushed."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import Any

import pytest
from django.core import mail
from django.db import connection

import outbox
from outbox import standing, transitions
from outbox.lifecycle import prune
from outbox.lifecycle.reconcile import Findings, over_age, reconcile
from outbox.lifecycle.reconcile.findings import Pass
from outbox.models import OutboxEntry, OutboxNotice, OutboxWorker
from outbox.states import FINAL, OPEN, State
from outbox.tasks import tell_owner
from tests import tasks
from tests.factories import ago, make_entries, make_entry, reread

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("valkey")]

APP = tasks.add.app
OLD: dict[str, Any] = {"owner": "tests", "available_at": ago(hours=-1)}  # nothing else finds it


def look(**how: Any) -> Findings:
    return reconcile(APP, using="default", **how)


def words() -> list[OutboxEntry]:
    """The messages that are owed to owners."""
    return list(OutboxEntry.objects.filter(task="outbox.tell_owner").order_by("pk"))


def noted() -> list[tuple[str, str]]:
    """What owners are to be told."""
    return list(OutboxNotice.objects.order_by("pk").values_list("owner", "about"))


@pytest.mark.parametrize("state", sorted(OPEN))
def test_an_owner_is_told_once_of_an_entry_that_is_over_age_in_any_open_state(state: State) -> None:
    entry = make_entry(state, due_at=ago(hours=1), subject="shop.order:7", **OLD)
    assert look().over_age == 1
    (word,) = words()
    assert (word.args, word.unique_key) == (["tests", "default"], "tests")
    assert [notice.entry_id for notice in OutboxNotice.objects.all()] == [entry.pk]
    assert noted() == [("tests", "over_age")]
    after = reread(entry)
    assert after.over_age_at is not None
    assert (after.status, after.version) == (entry.status, entry.version)
    assert look().over_age == 0
    assert len(words()) == len(noted()) == 1


@pytest.mark.parametrize("state", sorted(FINAL))
def test_an_entry_that_has_ended_is_not_over_age(state: State) -> None:
    make_entry(state, due_at=ago(hours=1), owner="tests")
    assert look().over_age == 0


def test_a_countdown_is_not_old_and_a_long_backoff_is() -> None:
    make_entry(created_at=ago(days=2), due_at=ago(hours=-1), **OLD)
    assert look().over_age == 0
    make_entry(due_at=ago(hours=1), failures=5, attempts=5, **OLD)
    assert look().over_age == 1


@pytest.mark.parametrize(
    ("own", "due_at", "count"),
    [(7200, ago(hours=1), 0), (7200, ago(hours=3), 1), (2.5, ago(seconds=10), 1)],
)
def test_a_tasks_own_over_age_goes_before_the_setting(
    own: float, due_at: datetime, count: int
) -> None:
    make_entry(due_at=due_at, options={"over_age": own}, **OLD)
    assert look().over_age == count


ODD = ["abc", {}, [], True, None, "NaN", "600", 0, -5, 1e308, 1e300, 1e-320]


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_an_over_age_that_is_no_number_counts_as_not_set(odd: Any) -> None:
    """Anybody's plain SQL may have written it: it must not stop the look at all the others."""
    make_entry(due_at=ago(seconds=-60), options={"over_age": odd}, **OLD)
    make_entry(due_at=ago(hours=1), options={"over_age": odd}, **OLD)
    assert standing.read(using="default").sum("over_age") == 1
    assert look(dry=True).over_age == 1
    assert look().over_age == 1


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_a_retention_that_is_no_number_counts_as_not_set(odd: Any) -> None:
    make_entry(State.SUCCEEDED, finished_at=ago(days=8), options={"retention": odd})
    kept = make_entry(State.FAILED, finished_at=ago(days=8), options={"retention": odd})
    gone = make_entry(State.FAILED, finished_at=ago(days=8), options={"retention": 60})
    assert prune.prune(using="default") == 2
    left = set(OutboxEntry.objects.values_list("pk", flat=True))
    assert kept.pk in left
    assert gone.pk not in left


@pytest.mark.parametrize("odd", [*ODD, 2.5], ids=str)
def test_a_max_crashes_that_is_no_whole_number_counts_as_not_set(odd: Any) -> None:
    entry = make_entry(State.FAILED, options={"max_crashes": odd})
    assert outbox.requeue(entry.pk, actor="user:ann")
    assert reread(entry).crash_limit == 3  # the setting's


def test_options_that_are_no_object_set_no_over_age() -> None:
    make_entry(due_at=ago(hours=1), options=["over_age"], **OLD)
    assert look().over_age == 1


def test_a_thousand_old_entries_are_one_message_for_each_owner() -> None:
    make_entries(1000, due_at=ago(hours=1), **OLD)
    make_entry(due_at=ago(hours=1), **{**OLD, "owner": "else"})
    make_entry(due_at=ago(hours=1), task="tests.tasks.echo", **OLD)
    assert look().over_age == 1002
    assert [word.args[0] for word in words()] == ["else", "tests"]
    assert Counter(noted()) == {("tests", "over_age"): 1001, ("else", "over_age"): 1}


def test_what_one_pass_does_not_tell_the_next_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_age, "TOLD", 2)
    make_entries(3, due_at=ago(hours=1), **OLD)
    assert [look().over_age for _ in range(3)] == [2, 1, 0]


def test_a_requeued_entry_may_be_told_of_again() -> None:
    entry = make_entry(State.FAILED, due_at=ago(hours=1), over_age_at=ago(minutes=1))
    outbox.requeue(entry.pk, actor="user:ann")
    assert look().over_age == 0
    OutboxEntry.objects.filter(pk=entry.pk).update(due_at=ago(hours=1))
    assert look().over_age == 1


def test_where_there_is_no_owner_nobody_is_told_and_it_is_counted_once() -> None:
    make_entry(due_at=ago(hours=1))
    assert [look().over_age, look().over_age] == [1, 0]
    assert words() == []
    assert noted() == []


def test_the_word_itself_is_told_of_to_nobody_when_it_is_old(settings: Any) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "DEFAULT_OWNER": "tests"}
    make_entry(task="outbox.tell_owner", due_at=ago(hours=1), available_at=ago(hours=-1))
    assert look().over_age == 0


def test_the_word_takes_a_queue_that_somebody_consumes() -> None:
    """That of the entry may be what nobody consumes: it would be as old as that is."""
    make_entry(due_at=ago(hours=1), **{**OLD, "queue": "forgotten"})
    look()
    assert words()[-1].queue == "celery"
    OutboxWorker.objects.create(queues=["mail", "slow"], heartbeat_at=ago(seconds=0))
    make_entry(due_at=ago(hours=1), **{**OLD, "owner": "else"})
    look()
    assert words()[-1].queue == "mail"


@pytest.mark.django_db(transaction=True)
def test_the_mark_and_the_word_commit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from outbox.transitions import repairs

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("killed here")

    entry = make_entry(due_at=ago(hours=1), **OLD)
    with monkeypatch.context() as patched:
        patched.setattr(repairs, "owe_word_to_owners", fail)
        with pytest.raises(ConnectionError):
            look()
    assert reread(entry).over_age_at is None
    assert look().over_age == 1


@pytest.mark.django_db(transaction=True)
def test_two_passes_at_once_tell_of_an_entry_once(second: Any) -> None:
    entry = make_entry(due_at=ago(hours=1), **OLD)
    with second.transaction():
        second.execute("UPDATE celery_outbox_entry SET over_age_at = now()")
        assert look().over_age == 0  # it waits for nobody
    assert look().over_age == 0
    assert words() == []
    assert noted() == []
    assert reread(entry).over_age_at is not None


def test_a_mark_that_somebody_else_has_made_is_not_made_again_whatever_was_looked_for() -> None:
    make_entry(due_at=ago(hours=1), over_age_at=ago(minutes=1), **OLD)
    rows = OutboxEntry.objects.filter(task="tests.tasks.add")
    assert transitions.note_over_age(rows, queue="celery", limit=9) == 0
    assert words() == []
    assert noted() == []


def test_what_an_earlier_release_owed_still_names_the_count_and_the_oldest() -> None:
    entry = make_entry(State.PUBLISHED, due_at=ago(hours=1), subject="shop.order:7", owner="tests")
    tell_owner.run(str(entry.pk), "tests", "default", over_age=1200)
    (message,) = mail.outbox
    assert message.subject == "[outbox] tests.tasks.add: 1,200 entries over age"
    assert message.to == ["owner@tests.example"]
    for needed in (str(entry.pk), "shop.order:7", "published", f"{entry.due_at:%H:%M:%S}"):
        assert needed in str(message.body)


@pytest.mark.parametrize("over_age", [0, 3])
@pytest.mark.parametrize("owners", [{}, {"ghost": []}])
def test_where_the_owner_has_no_address_the_default_owner_is_told_and_why(
    settings: Any, caplog: pytest.LogCaptureFixture, owners: dict[str, Any], over_age: int
) -> None:
    everybody = {**settings.OUTBOX["OWNERS"], **owners}
    settings.OUTBOX = {**settings.OUTBOX, "DEFAULT_OWNER": "tests", "OWNERS": everybody}
    entry = make_entry(State.FAILED, owner="ghost")
    tell_owner.run(str(entry.pk), "ghost", "default", over_age=over_age)
    (message,) = mail.outbox
    assert message.to == ["owner@tests.example"]
    assert "OUTBOX['OWNERS'] has no address of the owner, ghost" in str(message.body)
    assert "default owner, tests" in str(message.body)
    assert f"outbox.owner.unknown owner=ghost entry_id={entry.pk}" in caplog.text


def test_where_there_is_no_default_owner_either_nobody_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    entry = make_entry(State.FAILED, owner="ghost")
    tell_owner.run(str(entry.pk), "ghost", "default")
    assert mail.outbox == []
    assert "outbox.owner.unknown owner=ghost" in caplog.text


def test_an_owner_with_addresses_is_told_as_the_owner(
    settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "DEFAULT_OWNER": "tests"}
    tell_owner.run(str(make_entry(State.FAILED).pk), "tests", "default")
    assert "as the owner, tests." in str(mail.outbox[0].body)
    assert "outbox.owner.unknown" not in caplog.text


def test_entries_of_any_age_are_found_by_an_index() -> None:
    """Among entries that are told of already, or that are not old, it must read few."""
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO celery_outbox_entry (task) SELECT 'tests.tasks.add' "
            "FROM generate_series(1, 20000)"
        )
        cursor.execute("ANALYZE celery_outbox_entry")
    now = ago(seconds=0)
    this = Pass(app=APP, using="default", began=now, dry=True, remove=False, renew=lambda: None)
    plans = [rows[:10].explain() for rows in over_age._newly(this)]
    assert "celery_outbox_open" in plans[0]
    assert "celery_outbox_own_over_age" in plans[1]

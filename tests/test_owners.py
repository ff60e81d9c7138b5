"""The named owner: told of every entry, by one message at a time, and by one in `TELL_EVERY`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest
from celery.app.trace import build_tracer
from django.core import mail
from django.core.mail.backends.locmem import EmailBackend
from django.db import connection, transaction

import outbox
from outbox import signals, transitions
from outbox.events import Note
from outbox.lifecycle import lease, operate, prune, publish
from outbox.lifecycle.reconcile import Findings, reconcile
from outbox.models import OutboxEntry, OutboxNotice, OutboxQueue, OutboxWorker
from outbox.states import OPEN, State
from outbox.tasks import tell_owner
from tests import tasks
from tests.factories import PAST, ago, at, make_entries, make_entry, reread
from tests.waiting import wait_until

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("valkey")]

APP = tasks.add.app
EVERY = timedelta(seconds=300)  # as is the default
GATHER = timedelta(seconds=10)
NOTE = Note("tests", error="ValueError: no")

# What the transaction of a failure writes beside it.
NOTICE = "INSERT INTO celery_outbox_notice (entry_id, owner, about) VALUES (%s, 'tests', 'failed')"
MESSAGE = """
INSERT INTO celery_outbox_entry (task, unique_key) VALUES ('outbox.tell_owner', 'tests')
ON CONFLICT DO NOTHING
"""
LATE: dict[str, Any] = {"owner": "tests", "expires_at": at(PAST)}


def failing(**columns: Any) -> OutboxEntry:
    """An entry that has just failed for good."""
    entry = make_entry(State.RUNNING, **{"owner": "tests", "args": [], **columns})
    assert entry.claim_token is not None
    transitions.fail(entry.pk, token=entry.claim_token, note=NOTE, using="default")
    return reread(entry)


def owed() -> list[OutboxEntry]:
    """The messages that are owed, and not yet sent."""
    return list(
        OutboxEntry.objects.filter(task="outbox.tell_owner", status__in=OPEN).order_by("pk")
    )


def deliver(message: OutboxEntry) -> OutboxEntry:
    """Run it now, whenever it is due; the entry afterwards."""
    task: Any = tell_owner
    OutboxEntry.objects.filter(pk=message.pk, status=State.PENDING).update(available_at=at(PAST))
    task.__trace__ = build_tracer(task.name, task, app=APP)
    task.__trace__(str(message.pk), (), {}, {})
    return reread(message)


def tell() -> mail.EmailMessage:
    """Send the one message that is owed."""
    (message,) = owed()
    sent = len(mail.outbox)
    assert deliver(message).status == State.SUCCEEDED
    assert len(mail.outbox) == sent + 1
    return mail.outbox[-1]


def look(**how: Any) -> Findings:
    return reconcile(APP, using="default", **how)


def told_at() -> datetime:
    """When the last message was sent."""
    told = OutboxNotice.objects.filter(told_at__isnull=False).latest("told_at")
    assert told.told_at is not None
    return told.told_at


def die(*args: Any, **kwargs: Any) -> None:
    raise ConnectionError("killed here")  # an OSError, as those of a mail server


# --- one message --------------------------------------------------------------------------------


def test_a_thousand_failures_are_one_message() -> None:
    entries = make_entries(1000, **LATE)
    assert lease.expire_late(using="default") == 1000
    assert OutboxNotice.objects.count() == 1000
    message = tell()
    assert message.subject == "[outbox] 1,000 entries failed"
    body = str(message.body)
    assert "tests.tasks.add: 1,000 entries failed" in body
    assert [str(entry.pk) in body for entry in entries] == [True] * 10 + [False] * 990
    assert "and 990 more" in body
    assert owed() == []


def test_what_fails_within_the_first_seconds_goes_into_the_same_message() -> None:
    first = failing()
    (message,) = owed()
    assert message.available_at - message.created_at == GATHER
    assert message.due_at == message.available_at
    second = failing()
    assert owed() == [message]
    body = str(tell().body)
    assert str(first.pk) in body
    assert str(second.pk) in body


def test_two_owners_are_two_messages(settings: Any) -> None:
    both = {"tests": ["owner@tests.example"], "other": ["other@tests.example"]}
    settings.OUTBOX = {**settings.OUTBOX, "OWNERS": both}
    for owner in ("tests", "other", "tests"):
        failing(owner=owner)
    for message in owed():
        deliver(message)
    subjects = {message.to[0]: message.subject for message in mail.outbox}
    assert subjects == {
        "owner@tests.example": "[outbox] 2 entries failed",
        "other@tests.example": "[outbox] tests.tasks.add: failed",
    }


def test_what_fails_while_a_message_is_sent_is_in_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing()
    meanwhile: list[OutboxEntry] = []

    def send(self: EmailBackend, messages: Any) -> int:
        meanwhile.append(failing())
        return SEND(self, messages)

    with monkeypatch.context() as patched:
        patched.setattr(EmailBackend, "send_messages", send)
        tell()
    (following,) = owed()
    assert following.available_at == told_at() + EVERY
    second = tell()
    assert str(meanwhile[0].pk) in str(second.body)
    assert owed() == []


SEND = EmailBackend.send_messages


def test_the_next_message_waits_until_the_last_one_is_old_enough() -> None:
    failing()
    tell()
    failing()
    (message,) = owed()
    assert message.available_at == told_at() + EVERY
    OutboxNotice.objects.filter(told_at__isnull=False).update(told_at=ago(hours=1))
    outbox.cancel(message.pk, actor="user:ann")
    failing()
    (message,) = owed()
    assert message.available_at - message.created_at == GATHER


# --- repetitions --------------------------------------------------------------------------------


def test_a_message_that_may_have_been_sent_is_repeated_as_the_same_mail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = failing()
    (message,) = owed()
    with monkeypatch.context() as patched:
        patched.setattr(transitions, "note_told", die)  # sent, and killed before it is noted
        assert deliver(message).status == State.PENDING
    second = failing()
    assert owed() == [message]  # one at a time: the next one waits for this one's end
    tell()
    once, again = mail.outbox
    for sent in (once, again):  # by the domain of DEFAULT_FROM_EMAIL
        assert sent.message()["Message-ID"] == f"<{message.pk}@shop.example>"
    assert again.subject == once.subject
    for body in (str(once.body), str(again.body)):
        assert str(first.pk) in body
        assert str(second.pk) not in body
    assert str(second.pk) in str(tell().body)


def test_a_message_that_was_told_and_is_run_again_tells_nothing() -> None:
    failing()
    (message,) = owed()
    tell()
    second = failing()
    # As if it had been killed before its end was recorded.
    OutboxEntry.objects.filter(pk=message.pk).update(status="pending", finished_at=None)
    assert deliver(message).status == State.SUCCEEDED
    assert len(mail.outbox) == 1
    assert str(second.pk) in str(tell().body)


def test_a_run_that_lost_its_entry_takes_nothing() -> None:
    failing()
    (message,) = owed()
    whose: dict[str, Any] = {"token": UUID(int=1), "owner": "tests", "using": "default"}
    assert not transitions.take_notices(message.pk, **whose).exists()
    assert not OutboxNotice.objects.exclude(told_by=None).exists()


def test_called_plainly_it_has_nothing_to_tell() -> None:
    failing()
    tell_owner("tests", "default")
    assert mail.outbox == []


# --- what would be forgotten --------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_what_a_message_on_its_way_did_not_see_reconcile_owes(second: psycopg.Connection) -> None:
    """Its key is live when the failure is noted, and it has read the notices when that commits."""
    failing()
    (message,) = owed()
    late = make_entry(State.FAILED, owner="tests")
    with second.transaction():
        second.execute(NOTICE, [late.pk])
        assert second.execute(MESSAGE).rowcount == 0
        assert deliver(message).status == State.SUCCEEDED
    assert owed() == []
    assert look(dry=True).untold == 1
    assert owed() == []
    assert look().untold == 1
    (message,) = owed()
    assert message.available_at == told_at() + EVERY
    assert look().untold == 0
    assert str(late.pk) in str(tell().body)
    assert look().untold == 0


def given_up(monkeypatch: pytest.MonkeyPatch, message: OutboxEntry) -> OutboxEntry:
    """The message, for which the mail server was away for too long."""
    OutboxEntry.objects.filter(pk=message.pk).update(failure_limit=1)
    with monkeypatch.context() as patched:
        patched.setattr(EmailBackend, "send_messages", die)
        message = deliver(message)
    assert message.status == State.FAILED
    return message


def test_what_a_message_that_failed_has_taken_the_next_one_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = failing()
    failed = given_up(monkeypatch, owed()[0])
    assert OutboxNotice.objects.get().told_by == failed.pk
    second = failing()
    (message,) = owed()
    assert failed.finished_at is not None
    assert message.available_at == failed.finished_at + EVERY  # what is wrong may last
    body = str(tell().body)
    assert str(first.pk) in body
    assert str(second.pk) in body


def test_where_nothing_else_fails_reconcile_owes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first = failing()
    given_up(monkeypatch, owed()[0])
    assert [look().untold, look().untold] == [1, 0]
    assert str(first.pk) in str(tell().body)
    assert look().untold == 0


def test_a_message_that_failed_is_not_retried_beside_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing()
    failed = given_up(monkeypatch, owed()[0])
    failing()
    assert not outbox.requeue(failed.pk, actor="user:ann")
    tell()
    assert outbox.requeue(failed.pk, actor="user:ann")
    assert deliver(failed).status == State.SUCCEEDED  # there is nothing left to tell
    assert len(mail.outbox) == 1


@pytest.mark.parametrize("state", ["cancelled", "gone"])
def test_a_message_that_will_not_be_sent_is_owed_again(state: str) -> None:
    failing()
    (message,) = owed()
    if state == "cancelled":
        outbox.cancel(message.pk, actor="user:ann")
    else:
        OutboxEntry.objects.filter(pk=message.pk)._raw_delete("default")
    assert look().untold == 1
    tell()


def test_an_owner_who_has_yet_to_be_told_keeps_the_entry_from_being_pruned() -> None:
    entry = failing(options={"retention": 1})
    OutboxEntry.objects.filter(pk=entry.pk).update(finished_at=ago(hours=1))
    assert prune.prune(using="default") == 0
    tell()
    assert prune.prune(using="default") == 1
    assert not OutboxNotice.objects.exists()


# --- batches and locks --------------------------------------------------------------------------


def test_a_batch_owes_its_owners_their_messages_in_the_order_of_their_names() -> None:
    """Two batches that met them in different orders would wait for each other."""
    for owner in ("c", "a", "b"):
        make_entry(**{**LATE, "owner": owner})
    assert lease.expire_late(using="default") == 3
    assert [message.args[0] for message in owed()] == ["a", "b", "c"]


def test_a_batch_of_the_dispatcher_does_so_too() -> None:
    for owner in ("c", "a", "b"):
        make_entry(owner=owner, kwargs=["no object"])
    publish.dispatch(APP, batches=1, using="default")
    assert [message.args[0] for message in owed()] == ["a", "b", "c"]


@pytest.mark.django_db(transaction=True)
def test_a_recoverer_that_would_wait_for_too_long_keeps_what_it_did_and_reconcile_owes_the_message(
    second: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.transitions.notices.LOCK_TIMEOUT", "50ms")
    entry = make_entry(**LATE)
    with second.transaction(force_rollback=True):
        second.execute(MESSAGE)
        assert lease.expire_late(using="default") == 1
    assert reread(entry).status == State.FAILED
    assert owed() == []
    assert look().untold == 1
    tell()


@pytest.mark.django_db(transaction=True)
def test_a_worker_whose_job_fails_does_not_wait_for_one_that_stands_still_before_its_commit(
    second: psycopg.Connection,
) -> None:
    with second.transaction(force_rollback=True):
        second.execute(MESSAGE)
        entry = failing()
        assert reread(entry).status == State.FAILED
    assert entry.notices.count() == 1
    assert owed() == []
    assert look().untold == 1
    tell()


def waits_for_a_lock() -> bool:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT EXISTS (SELECT FROM pg_stat_activity "
            "WHERE datname = current_database() AND wait_event_type = 'Lock')"
        )
        return bool(cursor.fetchone()[0])


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("commits", [True, False])
def test_two_that_fail_at_the_same_moment_owe_one_message(
    second: psycopg.Connection, commits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later one waits for the earlier: had that been rolled back, its message would be none."""
    monkeypatch.setattr("outbox.transitions.notices.LOCK_TIMEOUT", "30s")
    entry = make_entry(State.FAILED, owner="tests")

    def fail() -> None:
        failing()
        connection.close()

    later = threading.Thread(target=fail)
    with second.transaction(force_rollback=not commits):
        second.execute(NOTICE, [entry.pk])
        second.execute(MESSAGE)
        later.start()
        wait_until(waits_for_a_lock)
    later.join(timeout=15)
    (message,) = owed()
    assert (message.args == ["tests", "default"]) is not commits  # whose it is
    assert OutboxNotice.objects.filter(told_at=None).count() == 1 + commits


def consume(*queues: str) -> None:
    OutboxWorker.objects.create(queues=queues, heartbeat_at=ago(seconds=0))


@pytest.mark.parametrize("queue", ["forgotten", "paused"])
def test_the_message_takes_a_queue_that_moves(queue: str) -> None:
    """What fails in one that stands still must not hold up all that its owner is told."""
    consume("mail", "paused", "slow")
    OutboxQueue.objects.create(name="paused", paused=True)
    make_entry(queue=queue, **LATE)
    lease.expire_late(using="default")
    assert owed()[0].queue == "mail"


@pytest.mark.parametrize("state", [State.PENDING, State.PUBLISHED])
def test_where_its_queue_has_come_to_a_stand_another_message_takes_its_place(state: State) -> None:
    entry = failing()
    (message,) = owed()
    rows = OutboxEntry.objects.filter(pk=message.pk)
    rows.update(status=state, published_at=at(), queue="forgotten", available_at=at(-EVERY))
    assert look().untold == 0  # as far as anybody knows, no queue moves
    consume("mail")
    assert look().untold == 1
    assert reread(message).status == State.CANCELLED
    assert owed()[0].queue == "mail"
    assert str(entry.pk) in str(tell().body)


def test_a_message_that_is_not_yet_due_is_left_in_its_queue() -> None:
    failing()
    OutboxEntry.objects.update(queue="forgotten")
    consume("mail")
    assert look().untold == 0
    assert owed()[0].queue == "forgotten"


# --- words --------------------------------------------------------------------------------------


def test_a_message_says_what_has_happened_and_how_it_stands_now() -> None:
    requeued = failing(subject="shop.order:7")
    failing(subject="shop.order:8")
    other = failing(task="tests.tasks.echo")
    parked = make_entry(State.RUNNING, owner="tests")
    assert parked.claim_token is not None
    transitions.park(parked.pk, token=parked.claim_token, note=NOTE, using="default")
    make_entry(State.PUBLISHED, owner="tests", due_at=ago(hours=1), published_at=ago(seconds=0))
    look()
    outbox.requeue(requeued.pk, actor="user:ann")
    message = tell()
    assert message.subject == "[outbox] 3 entries failed, 1 waits for a person, 1 over age"
    body = str(message.body)
    lines = body.splitlines()
    assert f"  {requeued.pk}  shop.order:7  ValueError: no  (now pending)" in lines
    assert f"  {other.pk}  ValueError: no" in lines
    assert "tests.tasks.add: 2 entries failed" in lines
    assert "tests.tasks.add: 1 entry waits for a person" in lines
    assert "tests.tasks.add: 1 entry over age" in lines
    assert body.index("failed") < body.index("waits for a person") < body.index("over age")
    for closing in ("is in the admin", "under Unfinished", "as the owner, tests."):
        assert closing in body


def test_an_entry_with_several_notices_is_listed_once_for_each_kind() -> None:
    entry = failing()
    for about in ("failed", "over_age"):
        OutboxNotice.objects.create(entry=entry, owner="tests", about=about)
    message = tell()
    assert message.subject == "[outbox] 1 entry failed, 1 over age"
    assert str(message.body).count(str(entry.pk)) == 2


def test_one_notice_is_a_message_about_that_entry() -> None:
    entry = failing(subject="shop.order:7")
    message = tell()
    assert message.subject == "[outbox] tests.tasks.add for shop.order:7: failed"
    assert str(entry.pk) in str(message.body)
    assert "ValueError: no" in str(message.body)


def test_one_that_is_old_is_a_message_about_that_entry() -> None:
    entry = make_entry(owner="tests", due_at=ago(hours=1), available_at=ago(hours=-1))
    look()
    message = tell()
    assert message.subject == "[outbox] tests.tasks.add: 1 entry over age"
    assert f"{entry.due_at:%H:%M:%S}" in str(message.body)


@pytest.mark.parametrize("count", [1, 2])
def test_nothing_of_an_erased_entry_is_said(count: int) -> None:
    for _ in range(count):
        failing(subject="user:secret")
    assert operate.erase(subject="user:secret", actor="user:ann") == count
    message = tell()
    text = str(message.message())
    assert "(erased)" in text
    assert "secret" not in text
    assert "ValueError" not in text


def test_line_breaks_in_a_subject_break_no_header() -> None:
    failing(subject="shop.order:7\r\nBcc: all@example.com", task="tests\n.add")
    message = tell()
    assert message.subject == "[outbox] tests .add for shop.order:7 Bcc: all@example.com: failed"
    assert "\n" not in message.message()["Subject"]


def test_where_the_owner_has_no_address_the_default_owner_is_told(settings: Any) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "DEFAULT_OWNER": "tests"}
    failing(owner="ghost")
    message = tell()
    assert message.to == ["owner@tests.example"]
    assert "no address of the owner, ghost" in str(message.body)


def test_where_there_is_nobody_to_tell_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing(owner="ghost")
    caplog.set_level(logging.WARNING, logger="outbox")
    assert deliver(owed()[0]).status == State.SUCCEEDED
    assert mail.outbox == []
    assert owed() == []
    assert caplog.text.count("outbox.owner.unknown owner=ghost") == 1
    assert look().untold == 0


def test_what_an_earlier_release_owed_is_still_told() -> None:
    """Its arguments name one entry, and it has no unique key."""
    entry = make_entry(State.FAILED, owner="tests")
    args = [str(entry.pk), "tests", "default"]
    old = make_entry(task="outbox.tell_owner", args=args, kwargs={})
    assert deliver(old).status == State.SUCCEEDED
    older = make_entry(task="outbox.tell_owner", args=args, kwargs={"over_age": 3})
    assert deliver(older).status == State.SUCCEEDED
    assert [message.subject for message in mail.outbox] == [
        "[outbox] tests.tasks.add: failed",
        "[outbox] tests.tasks.add: 3 entries over age",
    ]


# --- pagers -------------------------------------------------------------------------------------


@pytest.fixture
def paged() -> Iterator[list[dict[str, Any]]]:
    """What a pager hears that comes after a broken one."""
    heard: list[dict[str, Any]] = []

    def page(**told: Any) -> None:
        heard.append(told)

    signals.owner_needed.connect(die)
    signals.owner_needed.connect(page)
    yield heard
    signals.owner_needed.disconnect(page)
    signals.owner_needed.disconnect(die)


@pytest.mark.django_db(transaction=True)
def test_a_pager_hears_of_all_that_owners_are_told_after_the_commit(
    paged: list[dict[str, Any]],
) -> None:
    with transaction.atomic():
        entry = failing()
        assert paged == []
    old = make_entry(due_at=ago(hours=1), available_at=ago(hours=-1))  # and where there is no owner
    assert look().over_age == 1
    names = ("entry_id", "task", "about", "owner", "using")
    assert [tuple(told[name] for name in names) for told in paged] == [
        (entry.pk, "tests.tasks.add", "failed", "tests", "default"),
        (old.pk, "tests.tasks.add", "over_age", "", "default"),
    ]

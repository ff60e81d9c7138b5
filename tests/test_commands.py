"""The operator's commands: what they do, what they answer, and how they refuse."""

from __future__ import annotations

import getpass
import json
import socket
from io import StringIO
from typing import Any
from uuid import uuid4

import pytest
import redis
from django.core.management import CommandError, call_command
from django.db import connection

from outbox import ticks
from outbox.lifecycle.cancel import cancel
from outbox.models import OutboxEntry
from outbox.states import State
from tests.factories import ago, make_entry
from tests.waiting import wait_until
from tests.worker import app

pytestmark = pytest.mark.django_db

ACTOR = f"command:{getpass.getuser()}"


def said(*arguments: str) -> str:
    out = StringIO()
    call_command(*arguments, stdout=out)
    return out.getvalue()


def refused(*arguments: str) -> tuple[str, str]:
    """What a refused command printed, and its error."""
    out = StringIO()
    with pytest.raises(CommandError) as raised:
        call_command(*arguments, stdout=out)
    assert raised.value.returncode == 1
    return out.getvalue(), str(raised.value)


def status_of(entry: OutboxEntry) -> str:
    return OutboxEntry.objects.get(pk=entry.pk).status


# --- requeue and cancel -------------------------------------------------------------------------


def test_requeue_owes_entries_again_in_the_name_of_who_ran_it() -> None:
    failed, cancelled = make_entry(State.FAILED), make_entry(State.CANCELLED)
    words = said("outbox_requeue", str(failed.pk), str(cancelled.pk), "--reason", "mail is back")
    assert words.splitlines() == [f"{failed.pk}  owed again", f"{cancelled.pk}  owed again"]
    assert status_of(failed) == status_of(cancelled) == State.PENDING
    event = failed.events.get()
    assert (event.actor, event.reason) == (ACTOR, "mail is back")


def test_requeue_says_for_each_what_happened_and_fails_when_one_was_refused() -> None:
    failed, running = make_entry(State.FAILED), make_entry(State.RUNNING)
    late = make_entry(State.RUNNING)
    cancel(late.pk, actor="user:ada")
    unknown = uuid4()
    words, error = refused(
        "outbox_requeue", str(running.pk), str(failed.pk), str(late.pk), str(unknown)
    )
    assert words.splitlines() == [
        f"{running.pk}  refused: a run still goes on",
        f"{failed.pk}  owed again",
        f"{late.pk}  refused: a run still goes on",
        f"{unknown}  refused: no such entry",
    ]
    assert error == "3 of 4 refused."


def test_requeue_by_subject_takes_what_failed_and_leaves_what_somebody_cancelled() -> None:
    about = {"subject": "shop.order:42"}
    failed = make_entry(State.FAILED, **about)
    others = [make_entry(State.CANCELLED, **about), make_entry(State.FAILED)]
    said("outbox_requeue", "--subject", "shop.order:42")
    assert status_of(failed) == State.PENDING
    assert [status_of(entry) for entry in others] == [State.CANCELLED, State.FAILED]


def test_cancel_takes_ids_or_whatever_is_open_about_a_subject() -> None:
    about = {"subject": "shop.order:42"}
    entries = [make_entry(state, **about) for state in (State.PENDING, State.RUNNING)]
    done = make_entry(State.SUCCEEDED, **about)
    said("outbox_cancel", "--subject", "shop.order:42", "--reason", "the order was taken back")
    assert [status_of(entry) for entry in entries] == [State.CANCELLED, State.CANCELLED]
    assert status_of(done) == State.SUCCEEDED
    assert entries[0].events.get().actor == ACTOR
    words, _ = refused("outbox_cancel", str(done.pk))
    assert words == f"{done.pk}  refused: already ended: succeeded\n"


@pytest.mark.parametrize("command", ["outbox_requeue", "outbox_cancel"])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["42"], "'42' is not an entry's ID, which is a UUID."),
        ([], "Give the IDs of entries, or --subject."),
        (["--subject", "x", str(uuid4())], "Give the IDs of entries, or --subject."),
        (["--subject", "nothing"], "No entry about 'nothing' is "),
        ([str(uuid4()), "--database", "nowhere"], "DATABASES has no 'nowhere'"),
    ],
)
def test_a_wrong_choice_is_one_sentence(command: str, arguments: list[str], sentence: str) -> None:
    words, error = refused(command, *arguments)
    assert (words, error[: len(sentence)]) == ("", sentence)


def test_one_bad_id_among_several_changes_nothing() -> None:
    entry = make_entry(State.FAILED)
    refused("outbox_requeue", str(entry.pk), "42")
    assert status_of(entry) == State.FAILED


# --- reconcile and prune ------------------------------------------------------------------------


def test_reconcile_says_what_it_found(valkey: redis.Redis) -> None:
    make_entry(expires_at=ago(seconds=1))
    make_entry(State.PUBLISHED, published_at=ago(minutes=1))
    words = said("outbox_reconcile")
    assert "expired 1" in words
    assert "missing 1" in words


def test_reconcile_publishes_again_what_two_passes_missed(valkey: redis.Redis) -> None:
    entry = make_entry(State.PUBLISHED, published_at=ago(minutes=1))

    def stranded() -> int:
        return int(json.loads(said("outbox_reconcile", "--format", "json"))["stranded"])

    assert wait_until(stranded) == 1
    assert status_of(entry) == State.PENDING


@pytest.mark.parametrize("command", ["outbox_reconcile", "outbox_prune"])
def test_a_tick_that_another_process_is_at_is_left_to_it(valkey: redis.Redis, command: str) -> None:
    def meanwhile(renew: ticks.Renew) -> dict[str, Any]:
        return {"said": refused(command)[1]}

    name = command.removeprefix("outbox_")
    found = ticks.run_alone(name, meanwhile, lease=60, using="default")
    assert found is not None
    assert found["said"].startswith("Another process is ")


def test_reconcile_without_a_broker_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
    monkeypatch.setattr(app.conf, "broker_url", url)
    monkeypatch.setattr(app.conf, "broker_write_url", url)
    _, error = refused("outbox_reconcile")
    assert error.startswith("The broker does not answer: ")
    assert error.endswith("Lost messages were not looked for.")
    assert "\n" not in error


def test_prune_deletes_what_is_past_its_retention_and_says_how_many() -> None:
    make_entry(State.SUCCEEDED, finished_at=ago(days=8))
    kept = make_entry(State.FAILED, finished_at=ago(days=8))
    assert said("outbox_prune") == "1 entry deleted\n"
    assert list(OutboxEntry.objects.values_list("pk", flat=True)) == [kept.pk]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("command", ["outbox_status", "outbox_dispatcher", "outbox_cancel"])
def test_a_database_that_is_too_old_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The server is real; it is the oldest version that Django takes which is set higher."""
    monkeypatch.setattr(connection.features, "minimum_database_version", (99,))
    monkeypatch.setattr("django.db.backends.base.base.RAN_DB_VERSION_CHECK", set())
    connection.close()
    more = [str(uuid4())] if command == "outbox_cancel" else []
    _, error = refused(command, *more)
    assert error.startswith("The database 'default' is too old: PostgreSQL 99 or later is required")
    assert "\n" not in error

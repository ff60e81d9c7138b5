"""enqueue: the row commits with the caller's transaction, or says why it cannot."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest
import redis
from asgiref.sync import async_to_sync
from celery import chain, signals
from django.db import transaction

from outbox.errors import MisuseError, PayloadError, UnknownQueueError
from outbox.models import OutboxEntry
from outbox.states import State
from tests import tasks
from tests.factories import at
from tests.worker import app

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _broker(valkey: redis.Redis) -> None:
    """Every test publishes on commit to an empty broker."""


def entry_of(result: Any) -> OutboxEntry:
    return OutboxEntry.objects.get(pk=result.id)


class Undo(Exception):
    """Rolls a transaction back."""


def undone() -> None:
    try:
        with transaction.atomic():
            tasks.add.delay(1, 2)
            raise Undo
    except Undo:
        pass


def test_the_entry_commits_with_the_transaction_or_not_at_all(valkey: redis.Redis) -> None:
    undone()
    assert not OutboxEntry.objects.exists()
    assert valkey.llen("celery") == 0
    with transaction.atomic():
        result = tasks.add.delay(1, 2)
    assert entry_of(result).args == [1, 2]


def test_a_savepoint_that_is_rolled_back_takes_its_entry_along_and_no_other(
    valkey: redis.Redis,
) -> None:
    with transaction.atomic():
        first = tasks.add.delay(1, 1)
        undone()
        last = tasks.add.delay(3, 3)
    assert {entry_of(first).status, entry_of(last).status} == {State.PUBLISHED}
    assert OutboxEntry.objects.count() == 2
    assert valkey.llen("celery") == 2


def test_a_savepoint_that_enqueued_first_and_was_rolled_back_loses_nothing(
    valkey: redis.Redis,
) -> None:
    with transaction.atomic():
        undone()
        result = tasks.add.delay(3, 3)
    assert entry_of(result).status == State.PUBLISHED
    assert valkey.llen("celery") == 1


def test_all_entries_of_a_transaction_are_marked_by_one_statement(
    django_assert_num_queries: Any,
) -> None:
    # BEGIN, 4 × INSERT, COMMIT, then the paused queues and one UPDATE.
    with django_assert_num_queries(8), transaction.atomic():
        for number in range(4):
            tasks.add.delay(number, number)


def test_without_a_transaction_the_entry_is_published_at_once() -> None:
    assert entry_of(tasks.add.delay(1, 2)).status == State.PUBLISHED


def test_the_id_is_a_uuid_that_sorts_by_time() -> None:
    ids = [UUID(tasks.add.delay(1, 2).id) for _ in range(3)]
    assert {found.version for found in ids} == {7}


def test_a_task_id_of_ones_own_is_kept() -> None:
    given = str(uuid4())
    assert tasks.add.apply_async((1, 2), task_id=given).id == given


def test_an_id_that_is_no_uuid_is_refused_with_a_way_out() -> None:
    with pytest.raises(PayloadError, match="unique_key="):
        tasks.add.apply_async((1, 2), task_id="order-42")


def test_an_id_that_is_taken_is_refused_without_breaking_the_transaction() -> None:
    taken = tasks.add.delay(1, 2).id
    with transaction.atomic():
        with pytest.raises(MisuseError, match="one life"):
            tasks.add.apply_async((3, 4), task_id=taken)
        tasks.add.delay(5, 6)
    assert OutboxEntry.objects.count() == 2


def test_arguments_come_back_as_they_went_in() -> None:
    given: list[Any] = [
        uuid4(),
        datetime(2026, 1, 2, 3, tzinfo=UTC),
        Decimal("1.50"),
        "😀 é",
        {"a": [1]},
    ]
    assert entry_of(tasks.echo.delay(*given, at=given[1])).args == given


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (object(), "object"),
        (object, "type"),
        (float("nan"), "JSON"),
        (float("inf"), "JSON"),
        ("a\x00b", "NUL"),
        (["deep", {"er": "\x00"}], "NUL"),
        ("\ud800", "surrogate"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_any_sql(bad: Any, words: str) -> None:
    with transaction.atomic():
        with pytest.raises(PayloadError, match=words):
            tasks.echo.delay(bad)
        with pytest.raises(PayloadError, match=words):
            tasks.echo.delay(named=bad)
        tasks.add.delay(1, 2)  # the transaction is whole
    assert OutboxEntry.objects.count() == 1


def test_text_that_only_looks_like_an_escaped_nul_is_kept() -> None:
    for harmless in ("\\u0000", "\\\\u0000", "\\ud800", "C:\\u0000x"):
        assert entry_of(tasks.echo.delay(harmless)).args == [harmless]


def test_arguments_that_are_too_large_are_refused_with_the_setting_to_change() -> None:
    with pytest.raises(PayloadError, match="MAX_PAYLOAD_BYTES"):
        tasks.echo.delay("x" * 300_000)


def test_wrong_arguments_are_refused_as_celery_does() -> None:
    with pytest.raises(TypeError):
        tasks.add.delay(1)
    assert not OutboxEntry.objects.exists()


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(MisuseError, match="subjekt"):
        tasks.add.apply_async((1, 2), subjekt="order:1")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"time_limit": "x"}, "time_limit takes seconds"),
        ({"soft_time_limit": -1}, "soft_time_limit takes seconds"),
        ({"countdown": "abc"}, "countdown takes a number"),
        ({"countdown": float("nan")}, "countdown takes a number"),
        ({"countdown": 1e20}, "countdown takes a number"),
        ({"eta": "tomorrow"}, "eta takes a datetime"),
        ({"expires": "x"}, "expires takes a datetime"),
        ({"expires": float("inf")}, "expires takes a number"),
        ({"priority": 99999}, "priority takes a whole number"),
        ({"priority": "hi"}, "priority takes a whole number"),
        ({"queue": "a\x00"}, "queue must be text"),
        ({"queue": "q" * 5000}, "queue must be text"),
        ({"subject": 5}, "subject must be text"),
        ({"headers": {"id": "other", "task": "os.system"}}, "headers id, task"),
    ],
)
def test_a_bad_option_is_refused_by_name_and_leaves_the_transaction_whole(
    options: dict[str, Any], words: str
) -> None:
    with transaction.atomic():
        with pytest.raises(PayloadError, match=words):
            tasks.add.apply_async((1, 2), **options)
        tasks.add.delay(1, 2)
    assert OutboxEntry.objects.count() == 1


def test_an_unknown_queue_is_refused_where_celery_may_not_create_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    amqp = tasks.add.app.amqp
    strict = amqp.Router(amqp.Queues({"celery": {}}, create_missing=False), create_missing=False)
    monkeypatch.setattr(amqp, "router", strict)
    with pytest.raises(UnknownQueueError, match="task_queues"):
        tasks.add.apply_async((1, 2), queue="nowhere")
    assert not OutboxEntry.objects.exists()


def test_countdown_and_eta_become_columns_and_nothing_is_published(valkey: redis.Redis) -> None:
    later = entry_of(tasks.add.apply_async((1, 2), countdown=60))
    exactly = at(timedelta(hours=1))
    at_time = entry_of(tasks.add.apply_async((1, 2), eta=exactly))
    assert later.available_at > at(timedelta(seconds=50))
    assert later.due_at == later.available_at
    assert at_time.available_at == exactly
    assert valkey.llen("celery") == 0


def test_expires_and_the_retry_deadline_become_columns() -> None:
    entry = entry_of(tasks.add.apply_async((1, 2), expires=60))
    assert entry.expires_at is not None
    assert at(timedelta(seconds=50)) < entry.expires_at < at(timedelta(seconds=70))
    careful = entry_of(tasks.careful.apply_async(countdown=10))
    assert careful.deadline_at is not None
    assert careful.deadline_at - careful.due_at == timedelta(seconds=60)


def test_queue_and_priority_are_routed_now() -> None:
    entry = entry_of(tasks.add.apply_async((1, 2), queue="slow", priority=6))
    assert (entry.queue, entry.priority) == ("slow", 6)


def test_subject_and_owner_are_kept() -> None:
    entry = entry_of(tasks.failing.apply_async(subject="shop.order:42"))
    assert (entry.subject, entry.owner) == ("shop.order:42", "tests")
    assert entry_of(tasks.failing.apply_async(owner="me")).owner == "me"


def test_a_second_entry_with_a_live_unique_key_is_the_first() -> None:
    first, second = (tasks.add.apply_async((1, n), unique_key="k", countdown=9) for n in (1, 2))
    assert first.id == second.id
    assert (first.created, second.created) == (True, False)
    assert entry_of(first).args == [1, 1]
    other = tasks.echo.apply_async(unique_key="k", countdown=9)
    assert other.id != first.id


def test_the_values_of_named_arguments_can_make_the_unique_key() -> None:
    first = tasks.once_for_each.apply_async(("a",), countdown=9)
    again = tasks.once_for_each.apply_async(kwargs={"name": "a", "times": 2}, countdown=9)
    other = tasks.once_for_each.apply_async(("b",), countdown=9)
    assert first.id == again.id != other.id


def test_send_task_by_name_is_durable_too() -> None:
    assert entry_of(app.send_task("tests.tasks.add", (1, 2))).task == "tests.tasks.add"


def test_a_task_that_is_not_durable_goes_the_plain_way(valkey: redis.Redis) -> None:
    tasks.plain.delay("/nowhere")
    assert valkey.llen("celery") == 1
    assert not OutboxEntry.objects.exists()


def test_a_task_that_has_left_the_outbox_keeps_its_callers(valkey: redis.Redis) -> None:
    tasks.plain.apply_async(("/nowhere",), subject="order:1")
    assert valkey.llen("celery") == 1


def test_an_extra_option_for_another_kind_of_task_is_refused() -> None:
    with pytest.raises(MisuseError, match="OutboxTask"):
        app.send_task("celery.backend_cleanup", subject="order:1")


def test_a_chain_owes_its_first_step_and_keeps_the_rest_in_the_row() -> None:
    result = chain(tasks.add.s(1, 2), tasks.add.s(3), tasks.add.s(4)).apply_async()
    entry = OutboxEntry.objects.get()
    assert entry.args == [1, 2]
    assert len(entry.options["chain"]) == 2
    assert result.parent.parent.id == str(entry.pk)


def test_eager_and_direct_calls_run_plainly_without_a_row() -> None:
    assert tasks.add(1, 2) == 3
    assert tasks.add.apply((1, 2)).result == 3
    assert not OutboxEntry.objects.exists()


def test_an_async_view_enqueues() -> None:
    result = async_to_sync(tasks.add.aapply_async)((1, 2))
    assert entry_of(result).args == [1, 2]


def test_a_header_that_no_worker_could_decode_is_refused_in_the_caller() -> None:
    headers = {"day": {"__type__": "date", "__value__": "no date"}}
    with pytest.raises(PayloadError, match="options hold what no worker could decode"):
        tasks.add.apply_async((1, 2), headers=headers)
    assert not OutboxEntry.objects.exists()


def test_before_task_publish_fires_once_and_its_headers_are_kept() -> None:
    seen = []

    def receive(sender: str, headers: dict[str, Any], **_: Any) -> None:
        seen.append(sender)
        headers["traceparent"] = "00-abc"

    signals.before_task_publish.connect(receive)
    try:
        entry = entry_of(tasks.add.delay(1, 2))
    finally:
        signals.before_task_publish.disconnect(receive)
    assert seen == ["tests.tasks.add"]
    assert entry.options["headers"] == {"traceparent": "00-abc"}


def test_plain_sql_can_produce() -> None:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO celery_outbox_entry (task, args) VALUES ('tests.tasks.add', '[1, 2]')"
        )
    entry = OutboxEntry.objects.due().get()
    assert (entry.status, entry.args, entry.kwargs) == (State.PENDING, [1, 2], {})


def test_entries_cannot_be_saved_or_deleted_past_the_transitions() -> None:
    entry = entry_of(tasks.add.delay(1, 2))
    with pytest.raises(TypeError, match="transitions"):
        entry.save()
    with pytest.raises(TypeError, match="outbox_prune"):
        entry.delete()

"""publish: from the row to the broker. On commit, by the tick, the clerk and the dispatcher.

Publish before marking: a death between the two repeats a message; the other order loses one.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple
from uuid import UUID

from celery import Celery, signals
from celery.utils.nodenames import anon_nodename
from celery.utils.saferepr import saferepr
from django.db import DatabaseError, connections, transaction

from outbox import payload, prepared, sql, transitions
from outbox.brokers.sender import send, where
from outbox.conf import default_database, settings
from outbox.errors import BrokerUnavailable
from outbox.events import Note
from outbox.failpoints import Failpoint, reach
from outbox.models import OutboxEntry, OutboxQueue

logger = logging.getLogger("outbox")

EXTERNAL = "external"
DATABASE_HEADER = "outbox_database"  # only where it is not the first of OUTBOX["DATABASES"]
_IDLE = 10.0  # seconds beyond PUBLISH_TIMEOUT: an idle transaction must not hold rows for ever

_paused: dict[str, tuple[frozenset[str], float]] = {}

_NOTHING = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
_EMPTY_BODY = payload.dumps([[], {}, _NOTHING])


class Delivery(NamedTuple):
    """What a message is rendered from: the columns of `sql.DUE`, or a row just inserted."""

    id: UUID
    version: int
    task: str
    args: str  # JSON
    kwargs: str  # JSON
    options: Mapping[str, Any]
    queue: str
    priority: int
    retries: int
    root_id: UUID | None
    parent_id: UUID | None


def dispatch(app: Celery, *, batches: int | None = None, using: str) -> int:
    """Publish all that is due, in batches, each in a transaction of its own; how many.

    At most `batches` of them, for a caller that has other things to do.

    A dispatcher that dies frees its rows at once, since its locks die with it.

    Raises:
        BrokerUnavailable: nothing more can be published now; the rows stay as they are.
    """
    size, done = settings().BATCH_SIZE, 0
    for _ in count() if batches is None else range(batches):
        read, refused = _batch(app, size=size, using=using)
        done += read - refused
        if read < size:
            break
    return done


def _batch(app: Celery, *, size: int, using: str) -> tuple[int, int]:
    """How many were due, and how many of these the broker refused."""
    with transaction.atomic(using=using), transitions.gathered(using=using):
        with connections[using].cursor() as cursor:
            idle = round(1000 * (settings().PUBLISH_TIMEOUT + _IDLE))
            cursor.execute(f"SET LOCAL idle_in_transaction_session_timeout = {idle}")
        with prepared.cursor(using) as cursor:
            cursor.execute(sql.DUE, {"limit": size})
            rows = cursor.fetchall()
        refused = _publish_locked(app, rows, using=using) if rows else 0
    return len(rows), refused


def _from_row(row: Sequence[Any]) -> Delivery:
    delivery = Delivery(*row)
    options = payload.as_received(delivery.options)  # type: ignore[arg-type]
    return delivery._replace(options=options)


def _publish_locked(app: Celery, rows: Sequence[Sequence[Any]], *, using: str) -> int:
    messages: list[dict[str, Any]] = []
    sent: list[Delivery] = []
    for row in rows:
        try:
            delivery = _from_row(row)
            messages.append(render(delivery, using=using))
            sent.append(delivery)
        except Exception as error:  # it fails alone: the rows behind it go on
            _reject(row[0], error, using=using)
    refused = _send(app, sent, messages)
    reach(Failpoint.FLUSHED)
    _tell_celery(sent, messages)
    ours = [(item.id, item.version) for item in sent if not _is_external(item)]
    transitions.publish(ours, using=using)
    for delivery in filter(_is_external, sent):
        transitions.hand_off(OutboxEntry.objects.using(using).get(pk=delivery.id))
    if refused:
        least = timedelta(seconds=settings().DISPATCH_EVERY)
        transitions.postpone([item.id for item in refused], least=least, using=using)
    return len(refused)


def _send(
    app: Celery, deliveries: list[Delivery], messages: list[dict[str, Any]]
) -> Sequence[Delivery]:
    """Send them. Whose list the broker refused is taken out of both, and returned."""
    if not (lists := send(app, messages)):
        return ()
    for (queue, priority), why in lists.items():
        logger.warning("outbox.publish.refused queue=%s priority=%s: %s", queue, priority, why)
    refused = [item for item in deliveries if (item.queue, item.priority) in lists]
    deliveries[:] = [item for item in deliveries if (item.queue, item.priority) not in lists]
    messages[:] = [message for message in messages if where(message) not in lists]
    return refused


def _reject(entry_id: UUID, error: Exception, *, using: str) -> None:
    entry = OutboxEntry.objects.using(using).get(pk=entry_id)
    words = f"it cannot be rendered as a message: {type(error).__name__}: {error}"
    transitions.reject(entry, note=Note("dispatcher", words))


def on_commit(delivery: Delivery, *, app: Celery, using: str) -> None:
    """Publish when the caller's transaction commits, with all of its other entries at once."""
    waiting = connections[using].__dict__.setdefault("outbox_waiting", weakref.WeakKeyDictionary())
    hook = _Hook(delivery, app=app, using=using, waiting=waiting)
    waiting[hook] = None
    transaction.on_commit(hook, using=using, robust=True)


class _Hook:
    """One enqueue's hold on the commit. The first that runs publishes for all that are alive.

    Registered per enqueue, since Django drops the hooks of a savepoint that is rolled back, and
    held weakly by its siblings, so that what Django dropped is not published.
    """

    def __init__(
        self,
        delivery: Delivery,
        *,
        app: Celery,
        using: str,
        waiting: weakref.WeakKeyDictionary[_Hook, None],
    ) -> None:
        self.delivery, self.app, self.using, self.waiting = delivery, app, using, waiting

    def __call__(self) -> None:
        if self not in self.waiting:
            return
        deliveries = [hook.delivery for hook in self.waiting]
        self.waiting.clear()
        publish_committed(self.app, deliveries, using=self.using)


def publish_committed(app: Celery, deliveries: Sequence[Delivery], *, using: str) -> None:
    """Publish entries that have just been committed. A failure is logged: the rows are there."""
    reach(Failpoint.COMMITTED)
    if settings().PAUSED:
        return
    try:
        paused = paused_queues(using)
        ours = [item for item in deliveries if not _is_external(item) and item.queue not in paused]
        messages = [render(delivery, using=using) for delivery in ours]
        _send(app, ours, messages)
        reach(Failpoint.FLUSHED)
        _tell_celery(ours, messages)
        transitions.publish([(item.id, item.version) for item in ours], using=using)
    except (BrokerUnavailable, DatabaseError, ValueError, TypeError) as error:
        logger.warning("outbox.publish.deferred to the dispatcher: %s", error)


def paused_queues(using: str) -> frozenset[str]:
    """The queues that a person has paused, as known less than `DISPATCH_EVERY` seconds ago."""
    known, until = _paused.get(using, (frozenset[str](), 0.0))
    if time.monotonic() >= until:
        rows = OutboxQueue.objects.using(using).filter(paused=True)
        known = frozenset(rows.values_list("name", flat=True))
        _paused[using] = known, time.monotonic() + settings().DISPATCH_EVERY
    return known


def forget_paused_queues() -> None:
    """Look again at the next commit: a person in this process has just changed them."""
    _paused.clear()


def _is_external(delivery: Delivery) -> bool:
    return delivery.options.get("consumer") == EXTERNAL


def render(delivery: Delivery, *, using: str) -> dict[str, Any]:
    """The arguments of `kombu.Producer.publish`: Celery's protocol 2, by the anonymous exchange."""
    headers = protocol_headers(delivery) | delivery.options.get("headers", {})
    if using != default_database():
        headers[DATABASE_HEADER] = using
    return {
        "body": _body(delivery),
        "exchange": "",
        "routing_key": delivery.queue,
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "headers": headers,
        "correlation_id": str(delivery.id),
        "reply_to": "",
        "delivery_mode": 2,
        "priority": delivery.priority,
    }


def _body(delivery: Delivery) -> str:
    if not (delivery.args.startswith("[") and delivery.kwargs.startswith("{")):
        raise ValueError("args must be a JSON array and kwargs a JSON object")
    if not _carries_arguments(delivery):
        return _EMPTY_BODY
    embed = payload.dumps(embedded(delivery.options))
    return f"[{delivery.args}, {delivery.kwargs}, {embed}]"


def _carries_arguments(delivery: Delivery) -> bool:
    return delivery.options.get("payload") == "message" or _is_external(delivery)


def embedded(options: Mapping[str, Any]) -> dict[str, Any]:
    """The third part of a message's body: what follows the task."""
    return {name: options.get(name) for name in _NOTHING}


# The names of protocol 2, which a caller's headers must not replace (Celery's message protocol).
PROTOCOL = frozenset(
    [
        "lang",
        "task",
        "id",
        "shadow",
        "eta",
        "expires",
        "group",
        "group_index",
        "retries",
        "timelimit",
        "root_id",
        "parent_id",
        "argsrepr",
        "kwargsrepr",
        "origin",
        "ignore_result",
        "replaced_task_nesting",
        "stamped_headers",
        "stamps",
    ]
)


def protocol_headers(delivery: Delivery) -> dict[str, Any]:
    """Neither an ETA nor an expiry among them: Redis and the worker's clock would act on it."""
    options = delivery.options
    shown = _carries_arguments(delivery)
    return {
        "lang": "py",
        "task": delivery.task,
        "id": str(delivery.id),
        "shadow": options.get("shadow"),
        "eta": None,
        "expires": None,
        "group": options.get("group_id"),
        "group_index": options.get("group_index"),
        "retries": delivery.retries,
        "timelimit": options.get("timelimit") or [None, None],
        "root_id": str(delivery.root_id or delivery.id),
        "parent_id": delivery.parent_id and str(delivery.parent_id),
        "argsrepr": saferepr(payload.as_received(delivery.args)) if shown else "",
        "kwargsrepr": saferepr(payload.as_received(delivery.kwargs)) if shown else "",
        "origin": anon_nodename(),
        "ignore_result": options.get("ignore_result", False),
        "replaced_task_nesting": options.get("replaced_task_nesting", 0),
        "stamped_headers": options.get("stamped_headers"),
        "stamps": options.get("stamps", {}),
    }


def _tell_celery(sent: Sequence[Delivery], messages: Sequence[Mapping[str, Any]]) -> None:
    if not signals.after_task_publish.receivers:
        return
    for delivery, message in zip(sent, messages, strict=True):
        signals.after_task_publish.send(
            sender=delivery.task,
            body=message["body"],
            headers=message["headers"],
            exchange=message["exchange"],
            routing_key=message["routing_key"],
        )

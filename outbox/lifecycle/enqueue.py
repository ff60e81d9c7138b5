"""enqueue: the entry commits with the caller's transaction, or not at all."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from uuid import UUID

from celery import Celery, signals
from celery.result import AsyncResult

from outbox import transitions
from outbox.clock import as_uuid
from outbox.errors import MisuseError
from outbox.failpoints import Failpoint, reach
from outbox.lifecycle import order, publish
from outbox.models import OutboxEntry

if TYPE_CHECKING:
    from outbox.tasks import OutboxTask

_POSITIONAL = ("countdown", "eta", "task_id", "producer", "connection", "router", "result_cls")


def take_over_send_task() -> None:
    """Make every app's `send_task` durable for tasks that derive from OutboxTask.

    On the class, since an app may send by name before it has bound a single task.
    """
    plain = Celery.send_task
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def send_task(
        app: Celery, name: str, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any
    ) -> Any:
        options.update(zip(_POSITIONAL, rest, strict=False))
        task = durable_task(app, name, options.get("task_type"))
        if task is not None:
            return enqueue(task, args, kwargs, **options)
        return plain(app, name, args, kwargs, **_without_extras(app, name, options))

    Celery.send_task = send_task


def _without_extras(app: Celery, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """A task that has left by durable=False keeps its callers; any other never took these."""
    extras = [extra for extra in order.EXTRAS if extra in options]
    if extras and not hasattr(options.get("task_type") or app.tasks.get(name), "is_durable"):
        raise MisuseError(
            f"{name} does not derive from OutboxTask, so it cannot take {', '.join(extras)}."
        )
    return {option: value for option, value in options.items() if option not in extras}


def durable_task(app: Celery, name: str, task: Any = None) -> OutboxTask | None:
    """The durable task of that name in this code base, or None."""
    if task is None and (task := app.tasks.get(name)) is None:
        app.loader.import_default_modules()  # a web process may not have imported it yet
        task = app.tasks.get(name)
    return task if getattr(task, "is_durable", False) else None


def enqueue(task: OutboxTask, args: Any, kwargs: Any, **options: Any) -> AsyncResult:
    """Write the entry in the caller's transaction; publish it when that commits.

    Raises:
        PayloadError: arguments, ID or options that cannot be stored. Nothing was written.
        UnknownQueueError: no such queue, and Celery may not create it.
        MisuseError: the ID is another entry's, or an option is unknown.
    """
    task_id = order.task_id(options.pop("task_id", None), task=task.name)
    using = order.database(options.pop("using", None), task=task.name)
    row, more = _row(task, task_id, args, kwargs, options)
    created = transitions.enqueue(row, using=using)
    if not created:
        task_id = _first(row, using=using)
    else:
        reach(Failpoint.ENQUEUED)
        if row["countdown"] is not None and not row["countdown"]:
            publish.on_commit(_delivery(row, more), app=task.app, using=using)
    return _result(task, task_id, options, created=created)


def _row(
    task: OutboxTask, task_id: UUID, args: Any, kwargs: Any, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    app, name = task.app, task.name
    queue, priority = order.route(app, task, args, kwargs, options)
    parent = app.current_worker_task
    request = parent.request if parent else None
    row = {
        "id": task_id,
        "task": name,
        "args": order.stored(list(args or ()), what="arguments", task=name),
        "kwargs": order.stored(dict(kwargs or {}), what="keyword arguments", task=name),
        "queue": queue,
        "priority": priority,
        **order.times(app, task, options),
        "crash_limit": task.max_crashes,
        "subject": order.text(options.get("subject"), "subject", task=name),
        "unique_key": order.unique_key(task, args, kwargs, options) or None,
        "owner": order.text(options.get("owner") or task.owner, "owner", task=name),
        "root_id": as_uuid(options.get("root_id"))
        or (request and as_uuid(request.root_id))
        or task_id,
        "parent_id": as_uuid(options.get("parent_id")) or (request and as_uuid(request.id)),
    }
    more = order.row_options(task, options, unique_key=row["unique_key"])
    _before_publish(task, row, args, kwargs, more)
    row["options"] = order.stored_options(more, task=name)
    order.check_size(row, task=name)
    return row, more


def _before_publish(
    task: OutboxTask, row: Mapping[str, Any], args: Any, kwargs: Any, more: dict[str, Any]
) -> None:
    """Celery's signal, once, now: what its receivers add to the headers goes into the row."""
    if not signals.before_task_publish.receivers:
        return
    headers = publish.protocol_headers(_delivery(row, more))
    protocol = set(headers)
    signals.before_task_publish.send(
        sender=task.name,
        body=(args or (), kwargs or {}, publish.embedded(more)),
        exchange="",
        routing_key=row["queue"],
        declare=[],
        headers=headers,
        properties={"correlation_id": str(row["id"]), "priority": row["priority"]},
        retry_policy={},
    )
    added = {name: value for name, value in headers.items() if name not in protocol}
    if added:
        more["headers"] = {**more.get("headers", {}), **added}


def _delivery(row: Mapping[str, Any], options: Mapping[str, Any]) -> publish.Delivery:
    return publish.Delivery(
        id=row["id"],
        version=0,
        task=row["task"],
        args=row["args"],
        kwargs=row["kwargs"],
        options=options,
        queue=row["queue"],
        priority=row["priority"],
        retries=0,
        root_id=row["root_id"],
        parent_id=row["parent_id"],
    )


def _result(
    task: OutboxTask, task_id: UUID, options: Mapping[str, Any], *, created: bool
) -> AsyncResult:
    result: AsyncResult = task.AsyncResult(str(task_id))
    result.ignored = options.get("ignore_result")
    result.created = created
    parent = task.app.current_worker_task
    if parent and options.get("add_to_parent", True):
        parent.add_trail(result)
    return result


def _first(row: Mapping[str, Any], *, using: str) -> UUID:
    """The entry that holds this one's unique key."""
    live = OutboxEntry.objects.using(using).filter(task=row["task"], unique_key=row["unique_key"])
    if row["unique_key"] and (found := live.values_list("pk", flat=True).first()):
        return found
    raise MisuseError(
        f"{row['task']}: an entry with the ID {row['id']} exists. IDs are for one life; use "
        "unique_key= to enqueue something once."
    )

"""What a call asks for: checked, by name and before any SQL, and put into the row's words."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from celery import Celery
from celery.exceptions import QueueNotFound
from celery.utils.functional import maybe_list
from celery.utils.time import maybe_iso8601, maybe_make_aware

from outbox import payload
from outbox.clock import as_uuid, new_id
from outbox.conf import default_database, settings
from outbox.errors import MisuseError, PayloadError, UnknownQueueError
from outbox.lifecycle import publish

if TYPE_CHECKING:
    from outbox.tasks import OutboxTask

# What send_task() takes that lives in the row's options: its name there, and in the message.
_EMBEDDED = {"link": "callbacks", "link_error": "errbacks", "chain": "chain", "chord": "chord"}
_HEADERS = ("shadow", "group_id", "group_index", "replaced_task_nesting", "ignore_result")
EXTRAS = ("subject", "unique_key", "owner", "using")
# Fixed by the extension, or without meaning for a row: accepted as Celery does, and left out.
_WITHOUT_MEANING = (
    "producer", "publisher", "connection", "router", "route_name", "result_cls", "retries",
    "reply_to", "retry", "retry_policy", "declare", "serializer", "compression", "delivery_mode",
    "mandatory", "immediate", "delivery_info", "origin", "exchange", "routing_key", "queue",
    "exchange_type", "priority", "expiration", "timeout", "confirm_timeout",
)  # fmt: skip
LONGEST = 10.0**9  # seconds: what fits an interval and still means something
HIGHEST_PRIORITY = 255  # RabbitMQ's; with Redis 0 to 9, and 0 runs first


def row_options(
    task: OutboxTask, options: Mapping[str, Any], *, unique_key: str | None
) -> dict[str, Any]:
    """What the row keeps beside its columns: small, and {} for most entries."""
    stamps = {stamp: options[stamp] for stamp in options.get("stamped_headers") or ()}
    found: dict[str, Any] = {
        kept: maybe_list(options.get(given)) if given.startswith("link") else options.get(given)
        for given, kept in _EMBEDDED.items()
    }
    found |= {name: options.get(name) for name in _HEADERS}
    found["headers"] = _headers(task, options)
    found["timelimit"] = _time_limits(task, options)
    found["stamped_headers"] = list(stamps)
    found["stamps"] = stamps
    found["unique_key"] = unique_key
    found |= task.row_options()
    _refuse_unknown(task.name, options, stamps)
    return {name: value for name, value in found.items() if value or value == 0}


def _headers(task: OutboxTask, options: Mapping[str, Any]) -> dict[str, Any]:
    headers = dict(options.get("headers") or {})
    if taken := sorted(publish.PROTOCOL & set(headers)):
        raise PayloadError(
            f"{task.name}: the headers {', '.join(taken)} are the protocol's own.", task=task.name
        )
    return headers


def _refuse_unknown(task: str, options: Mapping[str, Any], stamps: Mapping[str, Any]) -> None:
    known = {
        *_EMBEDDED, *_HEADERS, *EXTRAS, *_WITHOUT_MEANING, *stamps, "headers", "time_limit",
        "soft_time_limit", "stamped_headers", "stamps", "countdown", "eta", "expires", "task_type",
        "add_to_parent", "root_id", "parent_id",
    }  # fmt: skip
    if unknown := sorted(set(options) - known):
        raise MisuseError(f"{task}: apply_async() does not take {', '.join(unknown)}.")


def _time_limits(task: OutboxTask, options: Mapping[str, Any]) -> list[Any] | None:
    limits = [options.get("time_limit"), options.get("soft_time_limit")]
    for name, limit in zip(("time_limit", "soft_time_limit"), limits, strict=True):
        if limit is not None and not (_is_number(limit) and limit > 0):
            raise _bad(task, name, limit, "seconds greater than 0")
    return limits if any(limits) else None


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= LONGEST  # not for NaN either
    )


def _bad(task: OutboxTask, name: str, value: Any, expected: str) -> PayloadError:
    return PayloadError(f"{task.name}: {name} takes {expected}, not {value!r:.80}.", task=task.name)


def times(app: Celery, task: OutboxTask, options: Mapping[str, Any]) -> dict[str, Any]:
    """ETA and expiry become columns: in a message Redis or a worker's clock would act on them."""
    countdown, eta, expires = (options.get(name) for name in ("countdown", "eta", "expires"))
    if countdown is not None and not _is_number(countdown):
        raise _bad(task, "countdown", countdown, "a number of seconds")
    if isinstance(expires, int | float) and not _is_number(expires):
        raise _bad(task, "expires", expires, "a number of seconds or a time")
    return {
        "countdown": None if eta else timedelta(seconds=countdown or 0),
        "eta": _moment(task, "eta", eta) if eta else None,
        "expires_in": timedelta(seconds=expires) if isinstance(expires, int | float) else None,
        "expires_at": None
        if expires is None or isinstance(expires, int | float)
        else _moment(task, "expires", expires),
        "retry_deadline": task.retry_deadline and timedelta(seconds=task.retry_deadline),
        # A moment for the on-commit publish, which is nearly always first.
        "publish_after": timedelta(seconds=settings().DISPATCH_EVERY),
    }


def _moment(task: OutboxTask, name: str, given: Any) -> datetime:
    try:
        found: datetime = maybe_make_aware(maybe_iso8601(given), task.app.timezone)
    except (ValueError, TypeError, AttributeError) as error:
        raise _bad(task, name, given, "a datetime or an ISO 8601 text") from error
    return found


def route(
    app: Celery, task: OutboxTask, args: Any, kwargs: Any, options: Mapping[str, Any]
) -> tuple[str, int]:
    asked = {
        name: options[name]
        for name in ("queue", "exchange", "routing_key", "priority")
        if options.get(name) is not None
    }
    try:
        routed = app.amqp.router.route(asked, task.name, args, kwargs, task)
    except QueueNotFound as error:
        raise UnknownQueueError(
            f"{task.name}: no queue named {error.args[0]!r}. Add it to task_queues, or set "
            "task_create_missing_queues.",
            queue=str(error.args[0]),
        ) from error
    queue = routed.get("queue") or app.amqp.default_queue
    name = text(getattr(queue, "name", queue), "queue", task=task.name)
    priority = routed.get("priority") or 0
    if not isinstance(priority, int) or not 0 <= priority <= HIGHEST_PRIORITY:
        raise _bad(task, "priority", priority, f"a whole number from 0 to {HIGHEST_PRIORITY}")
    return name, priority


def database(given: str | None, *, task: str) -> str:
    if given is not None and given not in settings().DATABASES:
        raise MisuseError(
            f"{task}: using={given!r}, but nobody dispatches from there. Add it to "
            "OUTBOX['DATABASES'], or leave it out."
        )
    return given or default_database()


def unique_key(task: OutboxTask, args: Any, kwargs: Any, options: Mapping[str, Any]) -> str:
    """The caller's key, or the values of the arguments that the task's `unique_by` names."""
    if options.get("unique_key") is not None or not task.unique_by:
        return text(options.get("unique_key"), "unique_key", task=task.name)
    bound = inspect.signature(task.run).bind(*(args or ()), **(kwargs or {}))
    bound.apply_defaults()
    values = [bound.arguments[name] for name in task.unique_by]
    key = stored(values, what="unique_by values", task=task.name)
    return key if len(key) <= 200 else hashlib.sha256(key.encode()).hexdigest()


def task_id(given: Any, *, task: str) -> UUID:
    if given is None:
        return new_id()
    found = as_uuid(given)
    if found is None:
        raise PayloadError(
            f"{task}: the task ID {given!r} is not a UUID. Leave it out, or use unique_key= for a "
            "name of your own.",
            task=task,
        )
    return found


def stored(value: Any, *, what: str, task: str) -> str:
    try:
        return payload.dumps(value)
    except PayloadError as error:
        raise PayloadError(f"{task}: its {what} {error}.", task=task) from error


def stored_options(value: Any, *, task: str) -> str:
    """As `stored`. They go into the message, so that whoever receives it must decode them."""
    text = stored(value, what="options", task=task)
    if '"__type__"' in text:
        try:
            payload.as_received(text)
        except (ValueError, TypeError, LookupError) as error:
            why = f"{task}: its options hold what no worker could decode: {error}."
            raise PayloadError(why, task=task) from error
    return text


def text(value: Any, what: str, *, task: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or value != payload.clean(value, limit=1_000):
        raise PayloadError(
            f"{task}: {what} must be text of at most 1,000 characters, not {value!r:.80}.",
            task=task,
        )
    return value


def check_size(row: Mapping[str, Any], *, task: str) -> None:
    limit = settings().MAX_PAYLOAD_BYTES
    size = sum(len(row[column].encode()) for column in ("args", "kwargs", "options"))
    if size > limit:
        raise PayloadError(
            f"{task}: its arguments take {size:,} bytes, the limit is {limit:,} "
            "(OUTBOX['MAX_PAYLOAD_BYTES']). Store the data and pass its key.",
            task=task,
        )

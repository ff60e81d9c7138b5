"""Connections to the broker that fail within `PUBLISH_TIMEOUT` instead of hanging or retrying."""

from __future__ import annotations

from typing import Any

from celery import Celery
from redis.exceptions import NoPermissionError, ResponseError

from outbox.conf import settings


def bounded(app: Celery) -> Any:
    """A new `kombu.Connection`, every step of which is bounded. The caller closes it."""
    timeout = settings().PUBLISH_TIMEOUT
    # Each URL of a failover list once: kombu's further rounds come after pauses of seconds.
    urls = app.connection_for_write().alt or [""]
    options: dict[str, Any] = {"max_retries": len(urls) - 1}
    if is_redis(app):
        bounds = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
        options |= bounds
        # What is set for the sentinels replaces what they would get of the sockets' options.
        if given := app.conf.broker_transport_options.get("sentinel_kwargs"):
            options["sentinel_kwargs"] = {**given, **bounds}
    return app.connection_for_write(connect_timeout=timeout, transport_options=options)


def is_redis(app: Celery) -> bool:
    """Whether the broker is Redis or Valkey, whose queues can be read."""
    return bool(app.connection_for_write().transport.driver_type == "redis")


def sentence(error: BaseException) -> str:
    """An error of any transport, as the end of a sentence."""
    reason = error.__cause__ or error  # kombu's own words for a pipeline hide the reason
    return " ".join(str(reason).split()).rstrip(".") or type(reason).__name__


def refusal(error: BaseException) -> str:
    """Why the server refuses one key, and no other; empty: it is not that.

    The key is of another type, or the user may not touch it. Other answers, such as that memory is
    full or a replica read-only, concern every key.
    """
    reason = error.__cause__ or error
    # redis-py puts the command before the server's words: of a message, nothing for a log.
    words = sentence(reason).rpartition("of pipeline caused error: ")[2]
    keyed = isinstance(reason, NoPermissionError) or words.startswith("WRONGTYPE")
    return words if isinstance(reason, ResponseError) and keyed else ""

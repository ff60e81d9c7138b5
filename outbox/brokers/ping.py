"""Whether the broker answers, asked once and for a bounded time."""

from __future__ import annotations

from typing import Any

from celery import Celery

from outbox.conf import settings


def why_unreachable(app: Celery) -> str:
    """One sentence on why no connection can be made within `PUBLISH_TIMEOUT`; empty: it can."""
    timeout = settings().PUBLISH_TIMEOUT
    options: dict[str, Any] = {"max_retries": 0}  # kombu's own come after pauses of seconds
    if app.connection_for_write().transport.driver_type == "redis":
        options |= {"socket_timeout": timeout, "socket_connect_timeout": timeout}
    try:
        with app.connection_for_write(
            connect_timeout=timeout, transport_options=options
        ) as connection:
            connection.default_channel  # noqa: B018  # connect() would try a second time
    except Exception as error:  # each transport has errors of its own
        return " ".join(str(error).split()).rstrip(".") + "."
    return ""

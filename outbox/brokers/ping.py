"""Whether the broker answers, asked once and for a bounded time."""

from __future__ import annotations

from celery import Celery

from outbox.brokers.connections import bounded, sentence


def why_unreachable(app: Celery) -> str:
    """One sentence on why no connection can be made within `PUBLISH_TIMEOUT`; empty: it can."""
    try:
        with bounded(app) as connection:
            connection.default_channel  # noqa: B018  # connect() would try a second time
    except Exception as error:  # each transport has errors of its own
        return f"{sentence(error)}."
    return ""

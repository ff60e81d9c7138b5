"""Brokers whose queues cannot be listed, such as RabbitMQ and SQS: at least, which are empty.

A queue that is not empty may hold a message or not: nobody can say. So what is lost is found
only once its queue is empty, and the promise is weaker than with Redis or Valkey.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from celery import Celery
from kombu.transport import virtual

from outbox.brokers.connections import bounded, sentence
from outbox.errors import BrokerUnavailable


def why_unlisted(app: Celery) -> str:
    """One sentence on what is done instead of a look."""
    name = app.connection_for_write().transport.driver_type
    return (
        f"The broker ({name}) cannot be listed: a message counts as lost once its queue is empty "
        "and no live worker holds it."
    )


def empty(app: Celery, *, queues: Iterable[str]) -> Collection[str]:
    """Those of `queues` that hold no message, as far as the transport can tell.

    Raises:
        BrokerUnavailable: it did not answer, so nothing is known.
    """
    try:
        with bounded(app) as connection:
            return {queue for queue in queues if _depth(connection, queue) == 0}
    except Exception as error:  # each transport has errors of its own
        raise BrokerUnavailable(f"The broker does not answer: {sentence(error)}.") from error


def _depth(connection: Any, queue: str) -> int | None:
    """How many messages wait in it; None where the transport does not say."""
    # A channel for each, since a broker closes the one on which it has refused something.
    with connection.channel() as channel:
        if isinstance(channel, virtual.Channel) and type(channel)._size is virtual.Channel._size:
            return None  # kombu's own stand-in, which says 0 of every queue
        try:
            return int(channel.queue_declare(queue=queue, passive=True).message_count)
        except connection.channel_errors as error:
            if str(getattr(error, "reply_code", "")) != "404":
                raise
            return 0  # there is no such queue: nothing can wait in it

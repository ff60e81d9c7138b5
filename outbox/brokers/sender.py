"""Sending messages: one bounded flush for many, and a breaker for a broker that is down."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from celery import Celery
from kombu.pools import ProducerPool

from outbox.brokers.connections import bounded, sentence
from outbox.conf import settings
from outbox.errors import BrokerUnavailable

POOL_SIZE = 10
PIPELINE = 500  # messages: one reply is awaited for so many

_pools: dict[tuple[int, int], ProducerPool] = {}
_closed_until = 0.0


def send(app: Celery, messages: Sequence[Mapping[str, Any]]) -> None:
    """Publish `messages` (arguments of `kombu.Producer.publish`) in as few round trips as can be.

    Bounded by `PUBLISH_TIMEOUT`. After a failure some of them may have landed all the same.

    Raises:
        BrokerUnavailable: it did not take them, or failed less than `BREAKER` seconds ago.
    """
    global _closed_until
    if time.monotonic() < _closed_until:
        raise BrokerUnavailable("The broker failed a moment ago and is left alone for now.")
    try:
        with _producer(app) as producer, _batch(producer, len(messages)):
            for message in messages:
                _declare(app, producer, message["routing_key"])
                producer.publish(**message, retry=False)
    # Rendering is done: whatever is raised in here, the broker did not confirm the batch.
    except Exception as error:
        _closed_until = time.monotonic() + settings().BREAKER
        _drop_pool(app)
        raise BrokerUnavailable(f"The broker did not take a batch: {sentence(error)}.") from error


def close_breaker() -> None:
    """Try the broker again at once."""
    global _closed_until
    _closed_until = 0.0


def _batch(producer: Any, size: int) -> AbstractContextManager[Any]:
    # kombu before 5.7, other transports, and Redis options that replay writes: one by one.
    if getattr(producer, "supports_batch_publish", False):
        return producer.batch(min(max(size, 1), PIPELINE))  # type: ignore[no-any-return]
    return nullcontext()


def _declare(app: Celery, producer: Any, queue: str) -> None:
    # The anonymous exchange drops what is sent to a queue that is not there. A Redis list is
    # there when it is pushed to; anywhere else the queue must be declared first, once.
    if producer.connection.transport.driver_type != "redis":
        producer.maybe_declare(app.amqp.queues[queue])


@contextmanager
def _producer(app: Celery) -> Iterator[Any]:
    timeout = settings().PUBLISH_TIMEOUT
    # By process: a pool that a fork inherited shares its sockets with the parent.
    key = (os.getpid(), id(app))
    if (pool := _pools.get(key)) is None:
        connections = bounded(app).Pool(limit=POOL_SIZE)
        pool = _pools[key] = ProducerPool(connections, limit=POOL_SIZE)
    with pool.acquire(block=True, timeout=timeout) as producer:
        yield producer


def _drop_pool(app: Celery) -> None:
    pool = _pools.pop((os.getpid(), id(app)), None)
    if pool is not None:
        pool.connections.force_close_all()

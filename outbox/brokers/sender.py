"""Sending messages: one bounded flush for many, and a breaker for a broker that is down."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from celery import Celery
from kombu.pools import ProducerPool

from outbox.brokers.connections import bounded, refusal, sentence
from outbox.conf import settings
from outbox.errors import BrokerUnavailable

POOL_SIZE = 10
PIPELINE = 500  # messages: one reply is awaited for so many

Messages = Sequence[Mapping[str, Any]]  # arguments of `kombu.Producer.publish`
Where = tuple[str, int]  # a queue and a priority: one list of Redis

_pools: dict[tuple[int, int], ProducerPool] = {}
_closed_until = 0.0
_suspects: set[Where] = set()  # were refused when they were last sent to


def send(app: Celery, messages: Messages) -> Mapping[Where, str]:
    """Publish `messages` in as few round trips as can be. What was refused, and why.

    Bounded by `PUBLISH_TIMEOUT`. After a failure some of them may have landed all the same; of
    what was refused none has, and all the rest.

    Raises:
        BrokerUnavailable: it did not take them, or failed less than `BREAKER` seconds ago.
    """
    global _closed_until
    if time.monotonic() < _closed_until:
        raise BrokerUnavailable("The broker failed a moment ago and is left alone for now.")
    try:
        with _producer(app) as producer:
            refused: dict[Where, str] = {}
            for some in _apart(messages, size=PIPELINE if _can_batch(producer) else 1):
                refused |= _flush(app, producer, some)
    # Rendering is done: whatever is raised in here, the broker did not confirm the batch.
    except Exception as error:
        _closed_until = time.monotonic() + settings().BREAKER
        _drop_pool(app)
        raise BrokerUnavailable(f"The broker did not take a batch: {sentence(error)}.") from error
    _suspects.difference_update(map(where, messages) if _suspects else ())
    _suspects.update(refused)
    return refused


def where(message: Mapping[str, Any]) -> Where:
    """The list that it goes to."""
    return message["routing_key"], message["priority"]


def _apart(messages: Messages, *, size: int) -> Iterator[Messages]:
    """At most `size` at once, and each list that was refused lately by itself."""
    parts: dict[Where | None, list[Mapping[str, Any]]] = {None: []}
    for message in messages:
        suspect = where(message) if _suspects and where(message) in _suspects else None
        parts.setdefault(suspect, []).append(message)
    for part in parts.values():
        for start in range(0, len(part), size):
            yield part[start : start + size]


def _flush(app: Celery, producer: Any, messages: Messages) -> Mapping[Where, str]:
    """Publish these in one round trip. What was refused, and why."""
    try:
        with _batch(producer, len(messages)):
            for message in messages:
                _declare(app, producer, message["routing_key"])
                producer.publish(**message, retry=False)
    except Exception as error:
        if not (why := refusal(error)):
            raise
        return _find(app, producer, messages, why=why)
    return {}


def _find(app: Celery, producer: Any, messages: Messages, *, why: str) -> Mapping[Where, str]:
    """Which lists of a pipeline were refused: kombu tells of the first error only."""
    one_each = {where(message): message for message in messages}
    if len(one_each) == 1:
        return dict.fromkeys(one_each, why)
    # The server answered each command, so what it did not refuse has landed. One message is
    # repeated for each list; from now on the refused ones are sent to apart.
    answers = (_flush(app, producer, [message]) for message in one_each.values())
    return {list_: words for answer in answers for list_, words in answer.items()}


def close_breaker() -> None:
    """Try the broker again at once."""
    global _closed_until
    _closed_until = 0.0


def forget_refusals() -> None:
    """Take every list for one that the broker accepts."""
    _suspects.clear()


def _batch(producer: Any, size: int) -> AbstractContextManager[Any]:
    # kombu before 5.7, other transports, and Redis options that replay writes: one by one.
    if _can_batch(producer):
        return producer.batch(size)  # type: ignore[no-any-return]
    return nullcontext()


def _can_batch(producer: Any) -> bool:
    return bool(getattr(producer, "supports_batch_publish", False))


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

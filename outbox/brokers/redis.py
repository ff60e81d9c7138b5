"""What Redis or Valkey really holds, read without disturbing it, in bounded memory.

Names come from kombu's channel, so that prefixes, separators and priority steps set in the
transport options are followed. Facts: kombu's `transport/redis.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from celery import Celery
from kombu.exceptions import OperationalError
from redis import Redis, RedisError

from outbox.brokers.connections import bounded, sentence
from outbox.errors import BrokerUnavailable

CHUNK = 500  # messages a read: longer ones make the broker's other clients wait

# The ID also stands in headers.id; the correlation ID is read since no argument can forge it
# (the body is base64, quotes in a repr are escaped). Separators as kombu's json writes them.
_ID = re.compile(rb'"correlation_id":\s*"([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})"')


class Held(NamedTuple):
    """The IDs, 16 bytes each, that the broker holds."""

    queued: set[bytes]  # in a priority list of a queue: a worker will take it
    unacked: set[bytes]  # a worker took it, and has not acknowledged it; which one, nobody says


def held(app: Celery, *, queues: Iterable[str]) -> Held:
    """What lies in the priority lists of `queues` and in `unacked`.

    A message that moves from a list to `unacked` between the reads would be missed if `unacked`
    were read first: the lists come first. One that is restored moves the other way, and is why
    a finding must be confirmed by a second look.

    Raises:
        BrokerUnavailable: it did not answer, so nothing is known.
    """
    try:
        with bounded(app) as connection, connection.default_channel as channel:
            # Not the channel's client: that prefixes the keys of kombu's own commands only.
            client = Redis(connection_pool=channel.pool)
            queued = {found for chunk in _lists(channel, client, queues) for found in _ids(chunk)}
            unacked = {found for chunk in _unacked(channel, client) for found in _ids(chunk)}
            return Held(queued, unacked)
    except (RedisError, OSError, OperationalError) as error:
        raise BrokerUnavailable(f"The broker does not answer: {sentence(error)}.") from error


def _lists(channel: Any, client: Any, queues: Iterable[str]) -> Iterator[list[bytes]]:
    for queue in queues:
        for step in channel.priority_steps:
            key = channel.global_keyprefix + channel._q_for_pri(queue, step)
            start = 0
            # From the head by positive index: a push at the head makes a re-read, never a miss.
            while chunk := client.lrange(key, start, start + CHUNK - 1):
                yield chunk
                start += len(chunk)


def _unacked(channel: Any, client: Any) -> Iterator[list[bytes]]:
    key, cursor = channel.global_keyprefix + channel.unacked_key, 0
    while True:
        cursor, found = client.hscan(key, cursor, count=CHUNK)
        yield list(found.values())
        if cursor == 0:
            return


def _ids(messages: Iterable[bytes]) -> Iterator[bytes]:
    for message in messages:
        for found in _ID.findall(message):
            yield bytes.fromhex(found.replace(b"-", b"").decode())

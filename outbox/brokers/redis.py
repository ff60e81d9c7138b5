"""What Redis or Valkey really holds, read without disturbing it, in bounded memory.

Names come from kombu's channel, so that prefixes, separators and priority steps set in the
transport options are followed, and so does the pool: a Sentinel's leads to the present primary.
Facts: kombu's `transport/redis.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from celery import Celery
from kombu.exceptions import OperationalError
from redis import Redis, RedisError, ResponseError

from outbox.brokers.connections import bounded, refusal, sentence
from outbox.errors import BrokerUnavailable

# One read, which the broker's other clients wait for: at most so many messages, and about so many
# bytes, by the largest message of the read before. Where large messages begin behind small ones,
# two reads are of that many messages all the same: the server cannot be asked for less by bytes.
LONGEST = 500
LARGEST = 524_288
_FIRST = 20  # messages: nothing is known of their size yet
# Then the replies are awaited: redis-py lets go of what it has received only when it has read all.
_IN_A_ROW = 16


class Look(NamedTuple):
    """An open connection to look through."""

    channel: Any
    client: Any
    refused: dict[str, str]  # the queues that the server would not list, and why


class Messages(NamedTuple):
    """Some messages of one list."""

    queue: str
    key: str
    raws: Sequence[bytes]


@contextmanager
def looking(app: Celery) -> Iterator[Look]:
    """Look at the broker. Read its lists before `unacked`.

    A message that moves from a list to `unacked` between the two reads would be missed the other
    way round. One that is restored moves back, and is why a finding must be confirmed by a second
    look.

    Raises:
        BrokerUnavailable: it did not answer, so nothing is known.
    """
    try:
        with bounded(app) as connection, connection.default_channel as channel:
            # Not the channel's client: that prefixes the keys of kombu's own commands only.
            yield Look(channel, Redis(connection_pool=channel.pool), {})
    except (RedisError, OSError, OperationalError) as error:
        raise BrokerUnavailable(f"The broker does not answer: {sentence(error)}.") from error


def lists(look: Look, queues: Iterable[str]) -> Iterator[Messages]:
    """What waits in every priority list of the queues, from the head, some at a time.

    A queue that the server refuses is noted in the look, and the others are read.
    """
    for queue in queues:
        for key in _keys(look.channel, queue):
            try:
                yield from (Messages(queue, key, raws) for raws in _list(look.client, key))
            except ResponseError as error:
                if not (why := refusal(error)):
                    raise
                look.refused[queue] = why
                break


def unacked(look: Look) -> Iterator[Sequence[bytes]]:
    """What workers have taken and not acknowledged: of every app on that database number."""
    key, cursor, size = look.channel.global_keyprefix + look.channel.unacked_key, 0, _FIRST
    while True:
        cursor, found = look.client.hscan(key, cursor, count=size)
        raws = list(found.values())
        yield raws
        if cursor == 0:
            return
        size = _next_size(size, raws)


def remove(look: Look, key: str, raw: bytes) -> bool:
    """Take exactly that message out of a list. False: it is not there any more."""
    return bool(look.client.lrem(key, 1, raw))


def _keys(channel: Any, queue: str) -> Iterable[str]:
    named = (channel._q_for_pri(queue, step) for step in channel.priority_steps)
    return dict.fromkeys(channel.global_keyprefix + key for key in named)


def _list(client: Any, key: str) -> Iterator[Sequence[bytes]]:
    with _alone(client) as connection:
        start, size, ended, in_a_row = 0, _FIRST, False, 0
        asked: deque[int] = deque()
        raws: Sequence[bytes] = ()
        while not ended or asked or raws:
            # Two reads under way: the server is at one while these are worked on.
            while not ended and len(asked) < 2 and in_a_row < _IN_A_ROW:
                _ask(connection, key, start, size)
                asked.append(size)
                start, in_a_row = start + size, in_a_row + 1
            if raws:
                yield raws
            raws = ()
            if asked:
                raws = connection.read_response()
                ended = len(raws) < asked.popleft() or ended
                size = _next_size(size, raws)
            else:
                in_a_row = 0


def _ask(connection: Any, key: str, start: int, size: int) -> None:
    # From the head by positive index: a push at the head makes a re-read, never a miss.
    connection.send_command("LRANGE", key, start, start + size - 1)


@contextmanager
def _alone(client: Any) -> Iterator[Any]:
    """A connection of the pool, without the client: that awaits each reply before it goes on."""
    connection = client.connection_pool.get_connection()
    try:
        yield connection
    except BaseException:
        connection.disconnect()  # a reply may be on its way that is nobody's now
        raise
    finally:
        client.connection_pool.release(connection)


def _next_size(size: int, raws: Sequence[bytes]) -> int:
    fitting = LARGEST // max([1, *map(len, raws)])
    return max(1, min(LONGEST, 4 * size, fitting))

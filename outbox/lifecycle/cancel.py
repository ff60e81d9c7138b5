"""cancel: an entry that will not run, or not again, whatever happens to it afterwards."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from outbox import transitions
from outbox.conf import default_database
from outbox.events import Note


def cancel(
    entry_id: UUID | str, *, actor: str, reason: str = "", terminate: bool = False, using: str = ""
) -> bool:
    """Cancel an entry: final at once in the record, on every path.

    A run that goes on is not interrupted, but its end is discarded. False: it has ended already.

    Args:
        actor: who asks for it, for the events: `user:alice`, `shop.orders`.
        terminate: also kill the child that runs it. Not supported yet.

    Raises:
        NotImplementedError: `terminate=True`.
    """
    if terminate:
        raise NotImplementedError("cancel(terminate=True) comes with the worker's clerk.")
    return transitions.cancel(
        as_id(entry_id), note=Note(actor, reason), using=using or default_database()
    )


def as_id(value: Any) -> UUID:
    """An entry's ID, from a UUID or its text.

    Raises:
        ValueError: it is neither.
    """
    return value if isinstance(value, UUID) else UUID(str(value))

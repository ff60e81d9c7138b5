"""What follows an entry's end: its links, the rest of its chain, its errbacks.

Whoever ends an entry may not have the code of what follows: a dispatcher, a sweep, a person's
admin. It owes an entry of `outbox.follow` for each, and a worker does the rest. The one exception
is a worker's own success, which owes them itself (`outbox.lifecycle.follow`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from outbox.clock import new_id
from outbox.models import OutboxEntry
from outbox.payload import dumps
from outbox.states import State, Verb
from outbox.transitions.jobs import enqueue, plain_row

FOLLOW = "outbox.follow"


class Kind(StrEnum):
    """What may follow, by its name in the entry's options."""

    LINK = "callbacks"
    CHAIN = "chain"
    ERRBACK = "errbacks"


_AFTER: Mapping[State, tuple[Kind, ...]] = {
    State.SUCCEEDED: (Kind.LINK, Kind.CHAIN),
    State.FAILED: (Kind.ERRBACK,),
}


def followers(options: Any, kind: Kind) -> list[Any]:
    """What follows, one by one; a chain's rest is one. Plain SQL may have written anything."""
    found = options.get(kind) if isinstance(options, dict) else None
    if not found:
        return []
    return found if isinstance(found, list) and kind is not Kind.CHAIN else [found]


def owe_followers(entry: OutboxEntry, verb: Verb, to: State, *, exception: str, using: str) -> None:
    """Owe what follows that end, in the same transaction. `exception` is JSON text, or empty.

    An entry each, so that one that fails undoes no other.
    """
    if verb is Verb.HANDOFF:  # its message has them: whoever runs it knows the result
        return
    for kind in _AFTER.get(to, ()):
        for index, _ in enumerate(followers(entry.options, kind)):
            row = _row(entry, kind, index, exception=exception, using=using)
            enqueue(row, using=using)


def _row(
    entry: OutboxEntry, kind: Kind, index: int, *, exception: str, using: str
) -> dict[str, Any]:
    """By number and not by value: what the options hold might not be stored a second time."""
    told = exception if kind is Kind.ERRBACK else ""
    given = {
        "id": new_id(),
        "task": FOLLOW,
        "args": dumps([str(entry.pk), kind, index, using]),
        "kwargs": f'{{"exception": {told}}}' if told else "{}",
        "priority": entry.priority,
        "subject": entry.subject,
        "owner": entry.owner,
        "parent_id": entry.pk,
        "root_id": entry.root_id or entry.pk,
    }
    if entry.options.get("consumer") != "external":  # whose queue is another code base's
        given["queue"] = entry.queue
    return plain_row(given)

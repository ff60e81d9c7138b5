"""What is told of a transition: the event row, the log line and the signal, always together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from outbox.models import OutboxEntry, OutboxEvent
from outbox.payload import clean
from outbox.signals import announce
from outbox.states import EDGES, Verb

logger = logging.getLogger("outbox")

ERROR_LIMIT = 2_000  # characters
TRACEBACK_LIMIT = 20_000

LATE = "late"  # the verb of the one event that moves nothing: a result that came too late


@dataclass(frozen=True)
class Note:
    """Who moved the entry and why; for the end of an attempt, what it raised."""

    actor: str
    reason: str = ""
    error: str = ""
    traceback: str = ""
    exception: str = ""  # as JSON, for errbacks; empty where the row's own words must do


def record(entry: OutboxEntry, verb: Verb | str, *, to: str, note: Note) -> None:
    """Write the event of a transition that has just been made, in its own transaction.

    `entry` is the row as it was before, so that the attempt's times are that attempt's.
    """
    using = entry._state.db
    if entry.is_erased:  # its run may have gone on, and end with what was to be forgotten
        note = Note(note.actor)
    OutboxEvent.objects.using(using).create(
        entry_id=entry.pk,
        verb=str(verb),
        from_status=entry.status,
        to_status=str(to),
        actor=note.actor,
        attempt=entry.attempts,
        worker=entry.lease_owner,
        reason=clean(note.reason, limit=ERROR_LIMIT),
        published_at=entry.published_at,
        started_at=entry.started_at,
        error=clean(note.error, limit=ERROR_LIMIT),
        traceback=clean(note.traceback, limit=TRACEBACK_LIMIT),
    )


def tell(
    verb: Verb,
    *,
    entry_id: UUID,
    task: str,
    status: str,
    owner: str,
    using: str,
    extra: Mapping[str, Any] = {},
) -> None:
    """Log `outbox.entry.<participle>` and send the verb's signal once it has committed."""
    edge = EDGES[verb]
    level = logging.DEBUG if edge.quiet else logging.INFO
    if logger.isEnabledFor(level):
        fields = {"entry_id": str(entry_id), "task": task, **extra}
        words = " ".join(f"{key}={value}" for key, value in fields.items() if value != "")
        logger.log(level, "outbox.entry.%s %s", edge.past, words, extra={"outbox": fields})
    announce(verb, entry_id=entry_id, task=task, status=status, owner=owner, using=using)

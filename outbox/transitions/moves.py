"""Compare and set: the one way in which a row that was read first is moved, and its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum
from typing import Any
from uuid import UUID

from django.db import DEFAULT_DB_ALIAS
from django.db.models import F, QuerySet, Value
from django.db.models.expressions import CombinedExpression
from django.db.models.functions import Now

from outbox.events import ERROR_LIMIT, TRACEBACK_LIMIT, Note, record, tell
from outbox.models import EntryQuerySet, OutboxEffect, OutboxEntry
from outbox.payload import clean
from outbox.states import EDGES, State, Verb
from outbox.transitions.followers import owe_followers
from outbox.transitions.notices import owe_word_to_owners

UNLEASED: Mapping[str, Any] = {"lease_owner": None, "lease_pid": None, "lease_until": None}


@dataclass(frozen=True)
class Holder:
    """Which run of an entry is meant: by its token, or by its owner and the child's PID."""

    token: UUID | None = None
    owner: UUID | None = None
    pid: int | None = None

    def columns(self) -> dict[str, Any]:
        if self.token:
            return {"claim_token": self.token}
        return {"lease_owner": self.owner, "lease_pid": self.pid}


class Ending(Enum):
    """What became of a worker's attempt to record how its run ended."""

    RECORDED = "recorded"
    GAVE_UP = "gave up"  # a retry, recorded as a failure: its next start would be too late
    REPEATED = "repeated"  # it stands already: the reply to an earlier try was lost
    CANCELLED = "cancelled"  # the entry was cancelled meanwhile; the run is settled
    REFUSED = "refused"  # the token is no longer the entry's: somebody else owns it


def begun_effects(entry: OutboxEntry) -> QuerySet[OutboxEffect]:
    """Effects that were begun and whose outcome nobody knows."""
    return OutboxEffect.objects.using(entry._state.db).filter(
        entry=entry, done_at__isnull=True, cleared_at__isnull=True
    )


def locked(using: str) -> EntryQuerySet:
    return OutboxEntry.objects.using(using).select_for_update(no_key=True)


def in_source(entry_id: UUID, verb: Verb, *, using: str) -> OutboxEntry | None:
    return locked(using).filter(pk=entry_id, status__in=EDGES[verb].sources).first()


def held(entry_id: UUID, *, token: UUID, using: str) -> OutboxEntry | None:
    return locked(using).filter(pk=entry_id, claim_token=token, status=State.RUNNING).first()


def running(entry_id: UUID, verb: Verb, *, holder: Holder, using: str) -> OutboxEntry | None:
    rows = locked(using).filter(pk=entry_id, status__in=EDGES[verb].sources, **holder.columns())
    return rows.filter(lease_owner__isnull=False).first()


def give_up(entry: OutboxEntry, verb: Verb, note: Note, **changes: Any) -> State:
    """End it as failed; never while an outside effect is begun and unsettled: that parks."""
    parked = begun_effects(entry).exists()
    to = State.UNCERTAIN if parked else State.FAILED
    end = {} if parked else ended()
    note = replace(note, error=note.error or note.reason)
    moved = move(entry, verb, to, note, **UNLEASED, **end, **changes)
    return to if moved else State(entry.status)


def ended() -> dict[str, Any]:
    return {"finished_at": Now(), "unique_key": None}


def after(delay: timedelta) -> CombinedExpression:
    return Now() + Value(delay)


def again(delay: timedelta | datetime) -> dict[str, Any]:
    """Due after `delay`, or at a time; the dispatcher need not wait for an on-commit publish."""
    at = delay if isinstance(delay, datetime) else after(delay)
    return {"available_at": at, "publish_after": Now(), "missing_since": None}


def move(entry: OutboxEntry, verb: Verb, to: State, note: Note, **changes: Any) -> bool:
    """Compare and set: the version that was read, in a state that the verb leaves from."""
    using = entry._state.db or DEFAULT_DB_ALIAS
    if note.error and not entry.is_erased:
        changes.setdefault("error", clean(note.error, limit=ERROR_LIMIT))
        changes.setdefault("traceback", clean(note.traceback, limit=TRACEBACK_LIMIT))
    rows = OutboxEntry.objects.using(using).filter(
        pk=entry.pk, version=entry.version, status__in=EDGES[verb].sources
    )
    if not rows.update(status=to, version=F("version") + 1, **changes):
        return False
    if not EDGES[verb].quiet:
        record(entry, verb, to=to, note=note)
    if to in (State.FAILED, State.UNCERTAIN) and to != entry.status:
        owe_word_to_owners([entry], about=str(to), queue=entry.queue, using=using)
    if to != entry.status:
        owe_followers(entry, verb, to, exception=note.exception, using=using)
    extra = {
        "to": str(to),
        "actor": note.actor,
        "reason": note.reason,
        "error": note.error.partition("\n")[0],
    }
    told: dict[str, Any] = {"entry_id": entry.pk, "task": entry.task, "owner": entry.owner}
    tell(verb, **told, status=str(to), using=using, extra=extra)
    return True

"""How a run ends, written by the worker that owns it and fenced by its token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import F

from outbox import prepared, sql
from outbox.events import LATE, Note, record, tell
from outbox.models import OutboxEntry
from outbox.states import State, Verb
from outbox.transitions.moves import (
    UNLEASED,
    Ending,
    Holder,
    after,
    again,
    give_up,
    held,
    locked,
    move,
    running,
)


def succeed(
    entry_id: UUID, *, token: UUID, result: str | None, task: str, owner: str, using: str
) -> Ending:
    """Record the end of a run that returned. `result` is JSON text, or None."""
    values: dict[str, Any] = {"id": entry_id, "token": token, "result": result}
    with prepared.cursor(using) as cursor:
        cursor.execute(sql.SUCCEED, values)
        recorded = cursor.rowcount == 1
    if not recorded:
        return late(entry_id, Verb.SUCCEED, token=token, note=Note("worker"), using=using)
    status = State.SUCCEEDED.value
    tell(Verb.SUCCEED, entry_id=entry_id, task=task, status=status, owner=owner, using=using)
    return Ending.RECORDED


def retry(
    entry_id: UUID,
    *,
    token: UUID,
    delay: timedelta | datetime,
    note: Note,
    changes: Mapping[str, Any],
    using: str,
) -> Ending:
    """A failure with budget left: due again after `delay` (or at a time), counted once.

    `changes` holds what `retry(args=…, kwargs=…, queue=…)` rewrites in the entry. Where it would
    start past its deadline, it fails at once.
    """
    with transaction.atomic(using=using):
        if (entry := held(entry_id, token=token, using=using)) is None:
            return late(entry_id, Verb.RETRY, token=token, note=note, using=using)
        if _past_deadline(entry, delay):
            deadline = f"its retry deadline, {entry.deadline_at:%Y-%m-%d %H:%M:%S %Z}"
            note = replace(note, reason=f"its next start would be past {deadline}")
            give_up(entry, Verb.FAIL, note, failures=F("failures") + 1)
            return Ending.GAVE_UP
        if changes:
            note = replace(note, reason=f"rewrites {', '.join(sorted(changes))}")
        due = {**again(delay), **UNLEASED, **changes}
        move(entry, Verb.RETRY, State.PENDING, note, failures=F("failures") + 1, **due)
    return Ending.RECORDED


def _past_deadline(entry: OutboxEntry, delay: timedelta | datetime) -> bool:
    start = delay if isinstance(delay, datetime) else after(delay)
    rows = OutboxEntry.objects.using(entry._state.db)
    return (
        entry.deadline_at is not None and rows.filter(pk=entry.pk, deadline_at__lte=start).exists()
    )


def fail(entry_id: UUID, *, token: UUID, note: Note, using: str) -> Ending:
    """A failure for good. Parks instead where an outside effect was begun and is unsettled."""
    with transaction.atomic(using=using):
        if (entry := held(entry_id, token=token, using=using)) is None:
            return late(entry_id, Verb.FAIL, token=token, note=note, using=using)
        give_up(entry, Verb.FAIL, note, failures=F("failures") + 1)
    return Ending.RECORDED


def park(entry_id: UUID, *, token: UUID, note: Note, using: str) -> Ending:
    """An outside effect's outcome is unknown: wait for a person."""
    with transaction.atomic(using=using):
        if (entry := held(entry_id, token=token, using=using)) is None:
            return late(entry_id, Verb.PARK, token=token, note=note, using=using)
        move(entry, Verb.PARK, State.UNCERTAIN, note, **UNLEASED)
    return Ending.RECORDED


def late(entry_id: UUID, verb: Verb, *, token: UUID, note: Note, using: str) -> Ending:
    """Why a worker's ending found no row of its own: repeated, cancelled, or another's now."""
    with transaction.atomic(using=using):
        entry = locked(using).filter(pk=entry_id).first()
        if entry is None:
            return Ending.REFUSED
        mine = entry.claim_token == token
        if mine and (recorded := _recorded(entry, verb)):
            return recorded
        reason = f"a run that no longer owned the entry ended ({verb}): discarded"
        record(entry, LATE, to=entry.status, note=replace(note, reason=reason))
        if not mine or entry.status != State.CANCELLED:
            return Ending.REFUSED
        if entry.run_goes_on:
            settle_locked(entry, note=Note("worker", "its run ended"))
        return Ending.CANCELLED


def _recorded(entry: OutboxEntry, verb: Verb) -> Ending | None:
    """What this very run has recorded before, when the reply to it was lost.

    By its events, since the entry may have gone on: a retry is due again, and is published.
    """
    if verb is Verb.SUCCEED:
        return Ending.REPEATED if entry.status == State.SUCCEEDED else None
    told = set(entry.events.filter(attempt=entry.attempts).values_list("verb", flat=True))
    if verb in told:
        return Ending.REPEATED
    return Ending.GAVE_UP if verb is Verb.RETRY and Verb.FAIL in told else None


def release(
    entry_id: UUID,
    *,
    holder: Holder,
    delay: timedelta | datetime = timedelta(),
    note: Note,
    using: str,
) -> bool:
    """Give a claimed entry back, due after `delay` or at a time; burns nothing."""
    with transaction.atomic(using=using):
        entry = running(entry_id, Verb.RELEASE, holder=holder, using=using)
        if entry is None:
            return False
        freed = {"claim_token": None, **again(delay), **UNLEASED}
        return move(entry, Verb.RELEASE, State.PENDING, note, releases=F("releases") + 1, **freed)


def settle(entry_id: UUID, *, holder: Holder, note: Note, using: str) -> bool:
    """The run of a cancelled entry is over: its lease is cleared, so that requeue may take it."""
    with transaction.atomic(using=using):
        entry = running(entry_id, Verb.SETTLE, holder=holder, using=using)
        return entry is not None and settle_locked(entry, note=note)


def settle_locked(entry: OutboxEntry, *, note: Note) -> bool:
    """`settle` of a locked entry whose lease is past."""
    return move(entry, Verb.SETTLE, State.CANCELLED, note, **UNLEASED)


def time_out(
    entry_id: UUID, *, holder: Holder, delay: timedelta, budget: int | None, note: Note, using: str
) -> State | None:
    """The hard time limit killed that child: a failure, never also a crash.

    `budget` is how many failures the task allows, where the row has no limit of its own.
    """
    with transaction.atomic(using=using):
        entry = running(entry_id, Verb.TIMEOUT, holder=holder, using=using)
        if entry is None:
            return None
        counted = {"failures": F("failures") + 1, "claim_token": None}
        limit = entry.failure_limit
        if limit is None and budget is not None:
            limit = entry.forgiven_failures + budget
        if limit is not None and entry.failures + 1 >= limit:
            return give_up(entry, Verb.TIMEOUT, note, **counted)
        move(entry, Verb.TIMEOUT, State.PENDING, note, **counted, **again(delay), **UNLEASED)
        return State.PENDING

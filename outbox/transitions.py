"""The only writer of an entry's status. Each verb is one guarded compare-and-set.

Locks are taken in ID order, FOR NO KEY UPDATE; recoverers skip what somebody holds. Whoever
works is fenced by the claim token, whoever read before acting by the version. Losing a race is
a value (False, None, a count), never an exception. Times are the database's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum
from typing import Any
from uuid import UUID

from django.db import DEFAULT_DB_ALIAS, IntegrityError, connections, transaction
from django.db.models import F, QuerySet, Value
from django.db.models.expressions import CombinedExpression
from django.db.models.functions import Now

from outbox import sql
from outbox.clock import new_id
from outbox.conf import settings
from outbox.events import ERROR_LIMIT, LATE, TRACEBACK_LIMIT, Note, record, tell
from outbox.models import EntryQuerySet, OutboxEffect, OutboxEntry, OutboxEvent
from outbox.payload import clean, dumps
from outbox.states import EDGES, FINAL, State, Verb

TELL_OWNER = "outbox.tell_owner"
LOCK_TIMEOUT = "2s"  # a recoverer waits for nobody longer than this

_UNLEASED: Mapping[str, Any] = {"lease_owner": None, "lease_pid": None, "lease_until": None}


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
    REPEATED = "repeated"  # it stands already: the reply to an earlier try was lost
    CANCELLED = "cancelled"  # the entry was cancelled meanwhile; the run is settled
    REFUSED = "refused"  # the token is no longer the entry's: somebody else owns it


# --- the happy path: one statement each, raw because the ORM has no UPDATE … RETURNING ----------


def enqueue(row: Mapping[str, Any], *, using: str) -> bool:
    """Insert an entry in the caller's transaction. False: its ID or live unique key is taken."""
    with connections[using].cursor() as cursor:
        cursor.execute(sql.ENQUEUE, row)
        inserted = bool(cursor.rowcount == 1)
    if inserted:
        _tell_row(Verb.ENQUEUE, row, using=using)
    return inserted


def plain_row(given: Mapping[str, Any]) -> dict[str, Any]:
    """A whole row for `enqueue`, due at once, from the columns that are given."""
    names = "eta expires_at expires_in retry_deadline crash_limit unique_key root_id parent_id"
    unset = dict.fromkeys(names.split())
    texts = {"args": "[]", "kwargs": "{}", "options": "{}", "subject": "", "owner": ""}
    at_once = {"countdown": timedelta(), "publish_after": timedelta()}
    return {**unset, **texts, **at_once, "queue": "celery", "priority": 0, **given}


def publish(read: Sequence[tuple[UUID, int]], *, using: str) -> int:
    """Mark as published what is still in the version that was read: (ID, version) pairs."""
    ids, versions = [str(pk) for pk, _ in read], [version for _, version in read]
    with connections[using].cursor() as cursor:
        cursor.execute(sql.PUBLISH, {"ids": ids, "versions": versions})
        return int(cursor.rowcount)


def claim(
    entry_id: UUID,
    *,
    task: str,
    token: UUID,
    owner: UUID,
    pid: int,
    lease: float,
    synced: bool,
    keep_unique: bool = False,
    using: str,
) -> dict[str, Any] | None:
    """Take the entry under a lease of `lease` seconds. None: it is not there to be claimed.

    Repeating it with the same token returns the same claim: its reply may have been lost.
    `synced=False` commits without waiting for the disk, which a crash of the server may forget.
    """
    values: dict[str, Any] = {
        "id": entry_id,
        "task": task,
        "token": token,
        "owner": owner,
        "pid": pid,
        "lease": timedelta(seconds=lease),
        "keep_unique": keep_unique,
    }
    with connections[using].cursor() as cursor:
        cursor.execute(sql.CLAIM if synced else sql.CLAIM_UNSYNCED, values)
        row = cursor.fetchone()
        columns = [column.name for column in cursor.description or ()]
    if row is None:
        return None
    found = dict(zip(columns, row, strict=True))
    _tell_row(Verb.CLAIM, found, using=using)
    return found


def renew(ids: Iterable[UUID], *, owner: UUID, lease: float, using: str) -> set[UUID]:
    """Extend the leases of the runs that `owner` knows to be alive; a locked row is skipped."""
    values: dict[str, Any] = {
        "ids": [str(pk) for pk in ids],
        "owner": owner,
        "lease": timedelta(seconds=lease),
    }
    with connections[using].cursor() as cursor:
        cursor.execute(sql.RENEW, values)
        return {row[0] for row in cursor.fetchall()}


def succeed(
    entry_id: UUID, *, token: UUID, result: str | None, task: str, owner: str, using: str
) -> Ending:
    """Record the end of a run that returned. `result` is JSON text, or None."""
    values: dict[str, Any] = {"id": entry_id, "token": token, "result": result}
    with connections[using].cursor() as cursor:
        cursor.execute(sql.SUCCEED, values)
        recorded = cursor.rowcount == 1
    if not recorded:
        return late(entry_id, Verb.SUCCEED, token=token, note=Note("worker"), using=using)
    tell(Verb.SUCCEED, entry_id=entry_id, task=task, owner=owner, using=using)
    return Ending.RECORDED


def _tell_row(verb: Verb, row: Mapping[str, Any], *, using: str) -> None:
    tell(verb, entry_id=row["id"], task=row["task"], owner=row["owner"], using=using)


# --- endings by the worker, fenced by its token -------------------------------------------------


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

    `changes` holds what `retry(args=…, kwargs=…, queue=…)` rewrites in the entry.
    """
    with transaction.atomic(using=using):
        if (entry := _held(entry_id, token=token, using=using)) is None:
            return late(entry_id, Verb.RETRY, token=token, note=note, using=using)
        if changes:
            note = replace(note, reason=f"rewrites {', '.join(sorted(changes))}")
        again = {**_again(delay), **_UNLEASED, **changes}
        _move(entry, Verb.RETRY, State.PENDING, note, failures=F("failures") + 1, **again)
    return Ending.RECORDED


def fail(entry_id: UUID, *, token: UUID, note: Note, using: str) -> Ending:
    """A failure for good. Parks instead where an outside effect was begun and is unsettled."""
    with transaction.atomic(using=using):
        if (entry := _held(entry_id, token=token, using=using)) is None:
            return late(entry_id, Verb.FAIL, token=token, note=note, using=using)
        _give_up(entry, Verb.FAIL, note, failures=F("failures") + 1)
    return Ending.RECORDED


def park(entry_id: UUID, *, token: UUID, note: Note, using: str) -> Ending:
    """An outside effect's outcome is unknown: wait for a person."""
    with transaction.atomic(using=using):
        if (entry := _held(entry_id, token=token, using=using)) is None:
            return late(entry_id, Verb.PARK, token=token, note=note, using=using)
        _move(entry, Verb.PARK, State.UNCERTAIN, note, **_UNLEASED)
    return Ending.RECORDED


def late(entry_id: UUID, verb: Verb, *, token: UUID, note: Note, using: str) -> Ending:
    """Why a worker's ending found no row of its own: repeated, cancelled, or another's now."""
    with transaction.atomic(using=using):
        entry = _locked(using).filter(pk=entry_id).first()
        if entry is None:
            return Ending.REFUSED
        mine = entry.claim_token == token
        if mine and entry.status in EDGES[verb].targets:
            return Ending.REPEATED
        reason = f"a run that no longer owned the entry ended ({verb}): discarded"
        record(entry, LATE, to=entry.status, note=replace(note, reason=reason))
        if not mine or entry.status != State.CANCELLED:
            return Ending.REFUSED
        if entry.run_goes_on:
            settle_locked(entry, note=Note("worker", "its run ended"))
        return Ending.CANCELLED


def release(entry_id: UUID, *, holder: Holder, note: Note, using: str) -> bool:
    """Give a claimed entry back, due now; burns nothing."""
    with transaction.atomic(using=using):
        entry = _running(entry_id, Verb.RELEASE, holder=holder, using=using)
        if entry is None:
            return False
        freed = {"claim_token": None, **_again(timedelta()), **_UNLEASED}
        return _move(entry, Verb.RELEASE, State.PENDING, note, releases=F("releases") + 1, **freed)


def settle(entry_id: UUID, *, holder: Holder, note: Note, using: str) -> bool:
    """The run of a cancelled entry is over: its lease is cleared, so that requeue may take it."""
    with transaction.atomic(using=using):
        entry = _running(entry_id, Verb.SETTLE, holder=holder, using=using)
        return entry is not None and settle_locked(entry, note=note)


def settle_locked(entry: OutboxEntry, *, note: Note) -> bool:
    """`settle` of a locked entry whose lease is past."""
    return _move(entry, Verb.SETTLE, State.CANCELLED, note, **_UNLEASED)


def time_out(
    entry_id: UUID, *, holder: Holder, delay: timedelta, limit: int | None, note: Note, using: str
) -> State | None:
    """The hard time limit killed that child: a failure, never also a crash."""
    with transaction.atomic(using=using):
        entry = _running(entry_id, Verb.TIMEOUT, holder=holder, using=using)
        if entry is None:
            return None
        counted = {"failures": F("failures") + 1, "claim_token": None}
        if limit is not None and entry.failures + 1 >= limit:
            return _give_up(entry, Verb.TIMEOUT, note, **counted)
        _move(entry, Verb.TIMEOUT, State.PENDING, note, **counted, **_again(delay), **_UNLEASED)
        return State.PENDING


# --- repairs by dispatcher, clerk and reconcile: on rows that `recovering` holds ----------------


@contextmanager
def recovering(rows: EntryQuerySet, *, limit: int) -> Iterator[list[OutboxEntry]]:
    """Hold up to `limit` of `rows`, in ID order, skipping what somebody else holds."""
    using = rows.db
    with transaction.atomic(using=using):
        with connections[using].cursor() as cursor:
            cursor.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
        locked = rows.using(using).order_by("pk").select_for_update(skip_locked=True, no_key=True)
        yield list(locked[:limit])


def crash(entry: OutboxEntry, *, delay: timedelta, limit: int, on_crash: str, note: Note) -> State:
    """Count a run whose process died: its lease is past, or its child was seen to be gone.

    At the cap it fails; `on_crash="park"` asks a person at once, `"fail"` ends it at once.
    """
    counted = {"crashes": F("crashes") + 1, "claim_token": None}
    if on_crash == "park":
        _move(entry, Verb.CRASH, State.UNCERTAIN, note, **counted, **_UNLEASED)
        return State.UNCERTAIN
    if on_crash == "fail" or entry.crashes + 1 >= limit:
        why = f"{note.reason}; crash {entry.crashes + 1} of at most {limit}"
        return _give_up(entry, Verb.CRASH, replace(note, reason=why, error=why), **counted)
    _move(entry, Verb.CRASH, State.PENDING, note, **counted, **_again(delay), **_UNLEASED)
    return State.PENDING


def strand(entry: OutboxEntry, *, note: Note) -> bool:
    """A published message that the broker does not hold: owed again, now."""
    again = _again(timedelta())
    return _move(entry, Verb.STRAND, State.PENDING, note, strands=F("strands") + 1, **again)


def expire(entry: OutboxEntry, *, note: Note) -> State:
    """Past `expires_at` or `deadline_at` before it started."""
    return _give_up(entry, Verb.EXPIRE, note)


def reject(entry: OutboxEntry, *, note: Note) -> State:
    """It cannot be rendered as a message: it fails alone."""
    return _give_up(entry, Verb.REJECT, note)


def hand_off(entry: OutboxEntry) -> bool:
    """The broker accepted the message of another code base's task: done from our side."""
    sent = {"publishes": F("publishes") + 1, "published_at": Now()}
    return _move(entry, Verb.HANDOFF, State.SUCCEEDED, Note("dispatcher"), **sent, **_ended())


def decline(entry_id: UUID, *, delay: timedelta, note: Note, using: str) -> bool:
    """A worker that does not know the task's code gives the delivery back; burns nothing."""
    with transaction.atomic(using=using):
        entry = _locked(using).filter(pk=entry_id, status=State.PUBLISHED).first()
        return entry is not None and _move(
            entry, Verb.DECLINE, State.PENDING, note, **_again(delay)
        )


def mark_missing(ids: Iterable[UUID], *, missing: bool, using: str) -> int:
    """Note, or take back, that a look at the broker did not find these published entries."""
    rows = OutboxEntry.objects.using(using).filter(pk__in=list(ids), status=State.PUBLISHED)
    unlike = rows.filter(missing_since__isnull=missing)
    return unlike.update(missing_since=Now() if missing else None)


# --- people -------------------------------------------------------------------------------------


def cancel(entry_id: UUID, *, note: Note, using: str) -> bool:
    """Final at once in the record; a run that goes on keeps its lease until it is settled."""
    with transaction.atomic(using=using):
        entry = _in_source(entry_id, Verb.CANCEL, using=using)
        return entry is not None and _move(entry, Verb.CANCEL, State.CANCELLED, note, **_ended())


def requeue(entry_id: UUID, *, note: Note, crash_budget: int, using: str) -> bool:
    """Owed again with a new budget on top of the old counts. False while a run goes on."""
    with transaction.atomic(using=using):
        entry = _in_source(entry_id, Verb.REQUEUE, using=using)
        if entry is None or entry.run_goes_on:
            return False
        anew = _new_budget(entry, crash_budget=crash_budget)
        try:
            with transaction.atomic(using=using):
                return _move(entry, Verb.REQUEUE, State.PENDING, note, **anew)
        except IntegrityError:  # its unique key belongs to a newer entry
            return False


def _new_budget(entry: OutboxEntry, *, crash_budget: int) -> dict[str, Any]:
    budget = entry.failure_limit and entry.failure_limit - entry.forgiven_failures
    span = entry.deadline_at and entry.deadline_at - entry.due_at
    return {
        **_again(timedelta()),
        "due_at": Now(),
        "deadline_at": span and _after(span),
        "expires_at": None,
        "finished_at": None,
        "forgiven_failures": entry.failures,
        "failure_limit": budget and entry.failures + budget,
        "crash_limit": entry.crashes + crash_budget,
        "claim_token": None,
        "unique_key": entry.options.get("unique_key"),
    }


def resolve(
    entry_id: UUID, *, effect: str | None, happened: bool, result: Any, note: Note, using: str
) -> bool:
    """A person's word on a parked entry. False: it is not uncertain, or has no such effect."""
    with transaction.atomic(using=using):
        entry = _in_source(entry_id, Verb.RESOLVE, using=using)
        if entry is None:
            return False
        if effect is None and begun_effects(entry).exists():
            return False
        if effect is not None and not _settle_effect(
            entry, effect, happened=happened, result=result, actor=note.actor
        ):
            return False
        if effect is None and happened:
            return _move(entry, Verb.RESOLVE, State.SUCCEEDED, note, result=result, **_ended())
        return _move(entry, Verb.RESOLVE, State.PENDING, note, **_again(timedelta()))


def _settle_effect(
    entry: OutboxEntry, name: str, *, happened: bool, result: Any, actor: str
) -> bool:
    outcome = {"done_at": Now(), "result": result} if happened else {"cleared_at": Now()}
    rows = begun_effects(entry).filter(name=name)
    return bool(rows.update(settled_by=actor, **outcome))


def run_now(entry_id: UUID, *, note: Note, using: str) -> bool:
    """Due now instead of later."""
    with transaction.atomic(using=using):
        entry = _in_source(entry_id, Verb.RUN_NOW, using=using)
        return entry is not None and _move(
            entry, Verb.RUN_NOW, State.PENDING, note, **_again(timedelta())
        )


def erase(entry_id: UUID, *, note: Note, using: str) -> bool:
    """Remove what the entry says: payload, options, result, error, and its events' texts."""
    with transaction.atomic(using=using):
        entry = _in_source(entry_id, Verb.ERASE, using=using)
        if entry is None:
            return False
        texts = {"reason": "", "error": "", "traceback": ""}
        OutboxEvent.objects.using(using).filter(entry=entry).update(**texts)
        OutboxEffect.objects.using(using).filter(entry=entry).update(request=None, result=None)
        empty: dict[str, Any] = {"args": [], "kwargs": {}, "options": {}, "result": None}
        to = State(entry.status)
        return _move(entry, Verb.ERASE, to, note, error="", traceback="", **empty)


def prune(rows: EntryQuerySet, *, limit: int) -> int:
    """Delete up to `limit` final entries with their events and effects."""
    with recovering(rows.filter(status__in=FINAL), limit=limit) as held:
        using, ids = rows.db, [entry.pk for entry in held if not entry.run_goes_on]
        for table in (OutboxEvent, OutboxEffect):
            table.objects.using(using).filter(entry_id__in=ids)._raw_delete(using)
        OutboxEntry.objects.using(using).filter(pk__in=ids)._raw_delete(using)
        return len(ids)


# --- shared -------------------------------------------------------------------------------------


def begun_effects(entry: OutboxEntry) -> QuerySet[OutboxEffect]:
    """Effects that were begun and whose outcome nobody knows."""
    return OutboxEffect.objects.using(entry._state.db).filter(
        entry=entry, done_at__isnull=True, cleared_at__isnull=True
    )


def _locked(using: str) -> EntryQuerySet:
    return OutboxEntry.objects.using(using).select_for_update(no_key=True)


def _in_source(entry_id: UUID, verb: Verb, *, using: str) -> OutboxEntry | None:
    return _locked(using).filter(pk=entry_id, status__in=EDGES[verb].sources).first()


def _held(entry_id: UUID, *, token: UUID, using: str) -> OutboxEntry | None:
    return _locked(using).filter(pk=entry_id, claim_token=token, status=State.RUNNING).first()


def _running(entry_id: UUID, verb: Verb, *, holder: Holder, using: str) -> OutboxEntry | None:
    rows = _locked(using).filter(pk=entry_id, status__in=EDGES[verb].sources, **holder.columns())
    return rows.filter(lease_owner__isnull=False).first()


def _give_up(entry: OutboxEntry, verb: Verb, note: Note, **changes: Any) -> State:
    """End it as failed; never while an outside effect is begun and unsettled: that parks."""
    parked = begun_effects(entry).exists()
    to = State.UNCERTAIN if parked else State.FAILED
    ended = {} if parked else _ended()
    note = replace(note, error=note.error or note.reason)
    moved = _move(entry, verb, to, note, **_UNLEASED, **ended, **changes)
    return to if moved else State(entry.status)


def _owe_word_to_owner(entry: OutboxEntry, *, using: str) -> None:
    """Owe the owner a message, in the same transaction. That entry itself has no owner."""
    owner = entry.owner or settings().DEFAULT_OWNER
    if not owner or entry.task == TELL_OWNER:
        return
    row = plain_row(
        {
            "id": new_id(),
            "task": TELL_OWNER,
            "args": dumps([str(entry.pk), owner]),
            "queue": entry.queue,
            "subject": entry.subject,
            "parent_id": entry.pk,
            "root_id": entry.root_id or entry.pk,
        }
    )
    enqueue(row, using=using)


def _ended() -> dict[str, Any]:
    return {"finished_at": Now(), "unique_key": None}


def _after(delay: timedelta) -> CombinedExpression:
    return Now() + Value(delay)


def _again(delay: timedelta | datetime) -> dict[str, Any]:
    """Due after `delay`, or at a time; the dispatcher need not wait for an on-commit publish."""
    at = delay if isinstance(delay, datetime) else _after(delay)
    return {"available_at": at, "publish_after": Now(), "missing_since": None}


def _move(entry: OutboxEntry, verb: Verb, to: State, note: Note, **changes: Any) -> bool:
    """Compare and set: the version that was read, in a state that the verb leaves from."""
    using = entry._state.db or DEFAULT_DB_ALIAS
    if note.error:
        changes.setdefault("error", clean(note.error, limit=ERROR_LIMIT))
        changes.setdefault("traceback", clean(note.traceback, limit=TRACEBACK_LIMIT))
    rows = OutboxEntry.objects.using(using).filter(
        pk=entry.pk, version=entry.version, status__in=EDGES[verb].sources
    )
    if not rows.update(status=to, version=F("version") + 1, **changes):
        return False
    if not EDGES[verb].quiet:
        record(entry, verb, to=to, note=note)
    if to in (State.FAILED, State.UNCERTAIN):
        _owe_word_to_owner(entry, using=using)
    extra = {
        "to": to,
        "actor": note.actor,
        "reason": note.reason,
        "error": note.error.partition("\n")[0],
    }
    tell(verb, entry_id=entry.pk, task=entry.task, owner=entry.owner, using=using, extra=extra)
    return True

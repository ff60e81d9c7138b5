"""What people do to entries, and the end of what is kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db import IntegrityError, transaction
from django.db.models import Exists, OuterRef, QuerySet
from django.db.models.functions import Now

from outbox.events import Note
from outbox.models import (
    ERASED,
    UNIQUE_KEY,
    EntryQuerySet,
    OutboxEffect,
    OutboxEntry,
    OutboxEvent,
    OutboxNotice,
)
from outbox.states import FINAL, State, Verb
from outbox.transitions.moves import after, again, begun_effects, ended, in_source, move
from outbox.transitions.repairs import recovering


def cancel(entry_id: UUID, *, note: Note, using: str) -> bool:
    """Final at once in the record; a run that goes on keeps its lease until it is settled."""
    with transaction.atomic(using=using):
        entry = in_source(entry_id, Verb.CANCEL, using=using)
        return entry is not None and move(entry, Verb.CANCEL, State.CANCELLED, note, **ended())


def requeue(entry_id: UUID, *, note: Note, crash_budget: int, using: str) -> bool:
    """Owed again with a new budget on top of the old counts.

    False while a run goes on, and where it was erased: nobody knows any more what is owed.
    """
    with transaction.atomic(using=using):
        entry = in_source(entry_id, Verb.REQUEUE, using=using)
        if entry is None or entry.run_goes_on or entry.is_erased:
            return False
        anew = _new_budget(entry, crash_budget=crash_budget)
        try:
            with transaction.atomic(using=using):
                return move(entry, Verb.REQUEUE, State.PENDING, note, **anew)
        except IntegrityError as error:
            if not _is_unique_key(error):
                raise
            return False  # it belongs to a newer entry


def _is_unique_key(error: IntegrityError) -> bool:
    diag = getattr(error.__cause__, "diag", None)
    return getattr(diag, "constraint_name", None) == UNIQUE_KEY


def _new_budget(entry: OutboxEntry, *, crash_budget: int) -> dict[str, Any]:
    budget = entry.failure_limit and entry.failure_limit - entry.forgiven_failures
    span = entry.deadline_at and entry.deadline_at - entry.due_at
    return {
        **again(timedelta()),
        "due_at": Now(),
        "deadline_at": span and after(span),
        "expires_at": None,
        "finished_at": None,
        "over_age_at": None,
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
        entry = in_source(entry_id, Verb.RESOLVE, using=using)
        if entry is None or (effect is None and begun_effects(entry).exists()):
            return False
        return _resolve(entry, effect, happened=happened, result=result, note=note)


@dataclass(frozen=True)
class Asked:
    """What a person was asked of an entry: its version then, and the effect ("": its last run)."""

    version: int
    effect: str


def resolve_next(
    entry_id: UUID, *, happened: bool, asked: Asked | None, note: Note, using: str
) -> bool:
    """The same of what it waits for: the first of its begun effects, or else its last run.

    With `asked`, of nothing else: it may have gone on, and wait for another word by now. Without,
    of no entry with several effects: a list that was read a while ago may mean another one.
    """
    with transaction.atomic(using=using):
        entry = in_source(entry_id, Verb.RESOLVE, using=using)
        if entry is None:
            return False
        if OutboxEntry.objects.using(using).filter(pk=entry_id).answered().exists():
            # Whatever the word: who performed it has told meanwhile, and the body runs on.
            return _resolve(entry, None, happened=False, result=None, note=note)
        effect = begun_effects(entry).order_by("id").values_list("name", flat=True).first()
        if asked and asked != Asked(entry.version, effect or ""):
            return False
        if not asked and entry.effects.count() > 1:
            return False
        return _resolve(entry, effect, happened=happened, result=None, note=note)


def _resolve(
    entry: OutboxEntry, effect: str | None, *, happened: bool, result: Any, note: Note
) -> bool:
    word = "it happened" if happened else "it did not happen"
    said = f"{effect}: {word}" if effect else word
    note = replace(note, reason=": ".join(filter(None, (said, note.reason))))
    if effect is not None and not _settle_effect(
        entry, effect, happened=happened, result=result, actor=note.actor
    ):
        return False
    if effect is None and happened:
        return move(entry, Verb.RESOLVE, State.SUCCEEDED, note, result=result, **ended())
    return move(entry, Verb.RESOLVE, State.PENDING, note, **again(timedelta()))


def resolve_answered(rows: EntryQuerySet, *, limit: int) -> int:
    """Let entries run on of whose effects nobody needs to say anything any more; how many."""
    note = Note("reconcile", "who performed its effect has told what became of it")
    with recovering(rows, limit=limit) as held:
        # Again under the lock: a person may have been first, and the body have parked once more.
        still = rows.in_bulk([entry.pk for entry in held])
        return sum(
            move(entry, Verb.RESOLVE, State.PENDING, note, **again(timedelta()))
            for entry in held
            if entry.pk in still
        )


def _settle_effect(
    entry: OutboxEntry, name: str, *, happened: bool, result: Any, actor: str
) -> bool:
    rows = begun_effects(entry).filter(name=name)
    return _say(rows, happened=happened, result=result, actor=actor)


def _say(rows: QuerySet[OutboxEffect], *, happened: bool, result: Any, actor: str) -> bool:
    outcome = {"done_at": Now(), "result": result} if happened else {"cleared_at": Now()}
    unsettled = rows.filter(done_at__isnull=True, cleared_at__isnull=True)
    return bool(unsettled.update(settled_by=actor, **outcome))


def settle_own_effect(key: str, *, happened: bool, result: Any, actor: str, using: str) -> bool:
    """A person's word on an effect that belongs to no entry. False: none, or it is settled."""
    rows = OutboxEffect.objects.using(using).filter(entry__isnull=True, key=key)
    return _say(rows, happened=happened, result=result, actor=actor)


def run_now(entry_id: UUID, *, note: Note, using: str) -> bool:
    """Due now instead of later."""
    with transaction.atomic(using=using):
        entry = in_source(entry_id, Verb.RUN_NOW, using=using)
        return entry is not None and move(
            entry, Verb.RUN_NOW, State.PENDING, note, **again(timedelta())
        )


def erase(entry_id: UUID, *, note: Note, using: str) -> bool:
    """Remove what the entry says: payload, options, result, error, and its events' texts."""
    with transaction.atomic(using=using):
        entry = in_source(entry_id, Verb.ERASE, using=using)
        if entry is None:
            return False
        texts = {"reason": "", "error": "", "traceback": ""}
        OutboxEvent.objects.using(using).filter(entry=entry).update(**texts)
        OutboxEffect.objects.using(using).filter(entry=entry).update(request=None, result=None)
        empty: dict[str, Any] = {"args": [], "kwargs": {}, "options": ERASED, "result": None}
        to = State(entry.status)
        return move(entry, Verb.ERASE, to, note, error="", traceback="", **empty)


def prune(rows: EntryQuerySet, *, limit: int) -> int:
    """Delete up to `limit` final entries with their events, effects and notices.

    What an owner has yet to be told of stays until that is done, as long as it takes.
    """
    untold = OutboxNotice.objects.filter(entry=OuterRef("pk"), told_at__isnull=True)
    ended = rows.filter(~Exists(untold), status__in=FINAL, lease_owner__isnull=True)
    with recovering(ended, limit=limit) as held:
        using, ids = rows.db, [entry.pk for entry in held]
        for table in (OutboxEvent, OutboxEffect, OutboxNotice):
            table.objects.using(using).filter(entry_id__in=ids)._raw_delete(using)
        OutboxEntry.objects.using(using).filter(pk__in=ids)._raw_delete(using)
        return len(ids)

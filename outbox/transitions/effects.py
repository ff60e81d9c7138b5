"""The ledger's own moves: an effect is begun by a run that owns its entry, and gets one outcome.

A begin is fenced by the claim token, under the entry's lock: neither a late nor a cancelled run
begins anything. What follows compares the begin's own token alone, so that a worker whose lease is
gone still tells what became of its call.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import (
    BooleanField,
    Case,
    DurationField,
    ExpressionWrapper,
    F,
    Q,
    QuerySet,
    When,
)
from django.db.models.functions import Now

from outbox.models import OutboxEffect
from outbox.transitions.moves import after, held


@dataclass(frozen=True, kw_only=True)
class Begin:
    """One beginning of an effect. Its token is drawn once, so that the statement may be repeated.

    `entry_id` and `claim_token` are None outside a task.
    """

    key: str
    name: str
    token: UUID
    request: Any
    timeout: timedelta  # how long the call may be under way
    entry_id: UUID | None = None
    claim_token: UUID | None = None
    attempt: int = 0
    using: str


@dataclass(frozen=True, kw_only=True)
class Standing:
    """An effect as the ledger has it, by the database's clock."""

    begin_token: UUID
    request: Any
    done_at: datetime | None
    cleared_at: datetime | None
    result: Any
    performer_until: datetime
    age: timedelta  # since it was first begun
    is_under_way: bool  # whether who began it last may still be at it


def begin_effect(this: Begin) -> Standing | None:
    """Note, durably, that it is about to be performed; how it stands then.

    Its `begin_token` is this one's where this has begun it; else it was begun before. None: the run
    no longer owns its entry.
    """
    row = OutboxEffect(
        entry_id=this.entry_id,
        name=this.name,
        key=this.key,
        request=this.request,
        begin_token=this.token,
        attempt=this.attempt,
        performer_until=after(this.timeout),
    )
    with transaction.atomic(using=this.using):
        if not _owns(this):
            return None
        OutboxEffect.objects.using(this.using).bulk_create([row], ignore_conflicts=True)
        return _standing(_rows(this.key, using=this.using))


def begin_effect_again(this: Begin, *, before: UUID) -> bool:
    """The same for one whose last beginning was `before`: it never happened, or may be repeated.

    False: the run no longer owns its entry, or somebody has begun it anew or settled it meanwhile.
    """
    # After a clearing nobody has seen its key: the time in which it may be repeated begins anew.
    first = Case(When(cleared_at__isnull=False, then=Now()), default=F("first_begun_at"))
    begun = {"begun_at": Now(), "attempt": this.attempt, "performer_until": after(this.timeout)}
    unsettled = {"cleared_at": None, "settled_by": ""}
    with transaction.atomic(using=this.using):
        if not _owns(this):
            return False
        rows = _unsettled(this.key, token=before, using=this.using)
        if rows.update(begin_token=this.token, first_begun_at=first, **begun, **unsettled):
            return True
        return _rows(this.key, using=this.using).filter(begin_token=this.token).exists()


def effect_done(key: str, *, token: UUID, result: Any, by: str, using: str) -> bool:
    """It happened, by the word of who began it, or of who was asked. False: not that beginning.

    Also where a person has said meanwhile that it did not: who performed it knows better.
    """
    rows = _unsettled(key, token=token, using=using)
    return bool(rows.update(done_at=Now(), cleared_at=None, result=result, settled_by=by))


def effect_cleared(key: str, *, token: UUID, by: str, using: str) -> bool:
    """It did not happen by that beginning. False: it has been settled, or begun anew."""
    rows = _unsettled(key, token=token, using=using).filter(cleared_at__isnull=True)
    return bool(rows.update(cleared_at=Now(), settled_by=by))


def _owns(this: Begin) -> bool:
    """Whether the run is still its entry's, which is held until the begin has committed."""
    if this.entry_id is None or this.claim_token is None:
        return True
    return held(this.entry_id, token=this.claim_token, using=this.using) is not None


def _rows(key: str, *, using: str) -> QuerySet[OutboxEffect]:
    return OutboxEffect.objects.using(using).filter(key=key)


def _unsettled(key: str, *, token: UUID, using: str) -> QuerySet[OutboxEffect]:
    return _rows(key, using=using).filter(begin_token=token, done_at__isnull=True)


def _standing(rows: QuerySet[OutboxEffect]) -> Standing:
    under_way = ExpressionWrapper(Q(performer_until__gt=Now()), output_field=BooleanField())
    age = ExpressionWrapper(Now() - F("first_begun_at"), output_field=DurationField())
    plain = [field.name for field in fields(Standing) if field.name not in ("age", "is_under_way")]
    return Standing(**rows.values(*plain, age=age, is_under_way=under_way).get())

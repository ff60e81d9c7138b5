"""The library's verbs as the model test calls them: by an entry's number, its times in hours."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

from django.db.models import F
from django.db.models.functions import Now

from outbox import payload, transitions
from outbox.events import Note
from outbox.lifecycle import lease
from outbox.models import EntryQuerySet, OutboxEffect, OutboxEntry, OutboxEvent, OutboxNotice
from outbox.states import State
from outbox.transitions import Ending, Holder
from tests.model import BACKOFF, LEASE, PENDING, Run, Terms

USING = "default"
NOTE = Note("tests", "because", error="ValueError: no", traceback="Traceback …")
HOUR = timedelta(hours=1)

FOLLOWED: dict[str, list[Any]] = {"callbacks": [{}], "chain": [{}, {}], "errbacks": [{}, {}]}

# What passes when time does. Each moves back, since the database's own clock cannot be set.
CLOCKS = (
    "available_at", "publish_after", "expires_at", "due_at", "deadline_at", "lease_until",
    "missing_since", "created_at", "published_at", "started_at", "finished_at",
)  # fmt: skip
# All that a claim could have written.
FORGETTABLE = tuple(
    field.name
    for field in OutboxEntry._meta.concrete_fields
    if field.name not in ("id", "args", "kwargs", "options", "result")
)


def entries(number: int) -> EntryQuerySet:
    return OutboxEntry.objects.filter(pk=UUID(int=number))


def subject(number: int) -> str:
    return f"tests.thing:{number}"


def clear() -> None:
    for table in (OutboxEvent, OutboxEffect, OutboxNotice, OutboxEntry):
        table.objects.all()._raw_delete(USING)


def enqueue(number: int, terms: Terms) -> bool:
    asked = {
        "on_crash": terms.on_crash,
        "max_crashes": terms.max_crashes,
        "unique_key": terms.key,
        **(FOLLOWED if terms.is_followed else {}),
    }
    row = {
        "id": UUID(int=number),
        "task": terms.task,
        "options": payload.dumps({name: value for name, value in asked.items() if value}),
        "countdown": terms.countdown * HOUR,
        "expires_in": _span(terms.expires_in),
        "retry_deadline": _span(terms.retry_deadline),
        "crash_limit": terms.crash_limit,
        "unique_key": terms.key,
        "owner": terms.owner,
        "subject": subject(number),
    }
    inserted = transitions.enqueue(transitions.plain_row(row), using=USING)
    if inserted:  # what only plain SQL gives
        entries(number).update(failure_limit=terms.failure_limit)
    return inserted


def _span(hours: int | None) -> timedelta | None:
    return None if hours is None else hours * HOUR


def read(number: int) -> OutboxEntry:
    """The row as it is now, for who may act on it much later; a blank one where it was pruned."""
    blank = OutboxEntry(
        id=UUID(int=number), version=0, status=PENDING, claim_token=None, options={}
    )
    return entries(number).first() or blank


def act(read: OutboxEntry, verb: str) -> bool:
    """What dispatcher and reconcile do to a row that they read before, by its version."""
    if verb == "publish":
        return transitions.publish([(read.pk, read.version)], using=USING) == 1
    if verb == "strand":
        return transitions.strand(read, note=NOTE)
    if verb == "handoff":
        return transitions.hand_off(read)
    return transitions.reject(read, note=NOTE) != read.status


def mark_missing(number: int, *, missing: bool) -> int:
    rows = OutboxEntry.objects.using(USING).filter(pk=UUID(int=number))
    return transitions.mark_missing(rows, missing=missing, limit=1)


def claim(run: Run, *, terms: Terms, task: str) -> tuple[int, int] | None:
    """The attempts and failures that the run begins with, or None."""
    found = transitions.claim(
        UUID(int=run.entry),
        task=task,
        token=run.token,
        owner=run.owner,
        pid=run.pid,
        lease=(LEASE * HOUR).total_seconds(),
        synced=terms.is_synced,
        keep_unique=terms.keeps_key,
        using=USING,
    )
    return None if found is None else (found["attempts"], found["failures"])


def renew(number: int, *, owner: UUID) -> bool:
    seconds = (LEASE * HOUR).total_seconds()
    return bool(transitions.renew([UUID(int=number)], owner=owner, lease=seconds, using=USING))


def end(run: Run, how: str, *, delay: int) -> Ending:
    pk, fence = UUID(int=run.entry), {"token": run.token, "using": USING}
    calls: dict[str, Callable[..., Ending]] = {
        "succeed": partial(transitions.succeed, result="1", task="", owner=""),
        "retry": partial(transitions.retry, delay=delay * HOUR, note=NOTE, changes={}),
        "fail": partial(transitions.fail, note=NOTE),
        "park": partial(transitions.park, note=NOTE),
    }
    return calls[how](pk, **fence)


def lose(run: Run, how: str, *, by_token: bool) -> bool:
    """The end of a run that says nothing itself: by its token, or by owner and PID."""
    calls: dict[str, Callable[..., object]] = {
        "crash": _crash,
        "release": transitions.release,
        "settle": transitions.settle,
    }
    pk, holder = UUID(int=run.entry), _holder(run, by_token=by_token)
    return bool(calls[how](pk, holder=holder, note=NOTE, using=USING))


def _holder(run: Run, *, by_token: bool) -> Holder:
    return Holder(token=run.token) if by_token else Holder(owner=run.owner, pid=run.pid)


def _crash(pk: UUID, *, holder: Holder, note: Note, using: str) -> bool:
    with transitions.lost_run(pk, holder=holder, using=using) as held:
        if held is not None:
            lease.crash(held, note=note)
        return held is not None


def time_out(run: Run, *, budget: int | None, delay: int) -> State | None:
    holder = _holder(run, by_token=False)
    more: dict[str, Any] = {"budget": budget, "note": NOTE, "using": USING}
    return transitions.time_out(UUID(int=run.entry), holder=holder, delay=delay * HOUR, **more)


def decline(number: int, *, delay: int) -> bool:
    return transitions.decline(UUID(int=number), delay=delay * HOUR, note=NOTE, using=USING)


def take_the_jitter_out(number: int) -> None:
    """Of a crash's backoff, which is none to some minutes: the model cannot know it."""
    rows, soon = entries(number).filter(status=PENDING), (Now() - HOUR, Now() + HOUR)
    assert rows.count() == rows.filter(available_at__range=soon).count()
    rows.update(available_at=Now() + BACKOFF * HOUR)


def begin_effect(number: int, name: str, *, token: UUID) -> None:
    """As the ledger does under the run's token, anew where it was cleared."""
    effects = OutboxEffect.objects.filter(entry_id=UUID(int=number), name=name)
    effects.delete()
    effects.create(entry_id=UUID(int=number), name=name, key=f"{number}:{name}", begin_token=token)


def finish_effect(number: int, name: str) -> None:
    rows = OutboxEffect.objects.filter(entry_id=UUID(int=number), name=name)
    rows.update(done_at=Now())


def remember(number: int) -> dict[str, Any]:
    return entries(number).values(*FORGETTABLE).first() or {}


def restore(number: int, columns: dict[str, Any], *, after: int) -> None:
    """The row as it was that many hours ago, as if the database had forgotten what came since."""
    entries(number).update(**columns)
    let_pass(entries(number), hours=after)


def let_pass(rows: EntryQuerySet, *, hours: int) -> None:
    rows.update(**{name: F(name) - hours * HOUR for name in CLOCKS})

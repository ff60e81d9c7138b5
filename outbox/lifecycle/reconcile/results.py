"""Result mismatch: TaskResult says other than the entry, and is corrected.

What can have gone wrong since the last pass is looked at, by three indexed windows of time:
entries that have ended, entries that a person has requeued, and results that were written. The
last one finds what Celery wrote late, or of an entry that is still open. The windows begin where
the last pass left off, however long ago; where that was not cut short, they overlap with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from celery import states
from django.db import DatabaseError
from django.db.models import F, QuerySet
from django.db.models.fields.json import KT

from outbox import ticks
from outbox.clock import as_uuid
from outbox.conf import DAY, settings
from outbox.lifecycle.publish import EXTERNAL
from outbox.lifecycle.reconcile import result_store, told
from outbox.lifecycle.reconcile.findings import Pass
from outbox.models import EntryQuerySet, OutboxEntry
from outbox.states import FINAL, State

CHUNK = 1_000  # rows a read
MOST = 100  # reads of each window in one pass; the next one goes on from there
MOMENT = timedelta(seconds=5)  # left to the worker, which stores a result after its entry's end
FIRST = timedelta(seconds=DAY)  # how far the very first pass looks back

_COLUMNS = (
    "status", "version", "task", "failures", "forgiven_failures", "started_at", "due_at",
    "finished_at",
)  # fmt: skip


class Wrong(NamedTuple):
    """An entry of which the store says something else."""

    entry: OutboxEntry
    stored: str | None


def compare(this: Pass) -> dict[str, Any]:
    """Correct what differs; how many. Says so where nothing can be compared."""
    if why := result_store.why_not_compared(this.app):
        return {"results": why}
    try:
        return {"mismatched": _compare(this)}
    except DatabaseError as error:
        return {"results": f"Results were not compared: {' '.join(str(error).split())}"}


def _compare(this: Pass) -> int:
    since = ticks.compared_until(using=this.using) or this.began - FIRST
    until = this.began - MOMENT
    overlap = timedelta(seconds=max(60, 2 * settings().RECONCILE_EVERY))
    corrected, reached, seen = 0, until - overlap, set[UUID]()
    for window in (_ended, _requeued, _written):
        chunks = window(this, since, until)
        left = settings().REPAIRS_PER_PASS - corrected
        done, at = _correct_all(this, chunks, seen, left=left)
        corrected, reached = corrected + done, min(reached, at or reached)
    if not this.dry and reached > since:
        ticks.note_compared(reached, using=this.using)
    waiting = {entry.pk: entry for entry in (*_parked(this), *_uncertain(this))}
    return corrected + _correct(this, list(waiting.values()), seen)


Chunk = tuple[Sequence[OutboxEntry], datetime]  # and the time of the last one


def _correct_all(
    this: Pass, chunks: Iterator[Chunk], seen: set[UUID], *, left: int
) -> tuple[int, datetime | None]:
    """How many were corrected, and up to when; None: the window was looked through."""
    corrected = 0
    for number, (entries, at) in enumerate(chunks, start=1):
        corrected += _correct(this, entries, seen)
        this.renew()
        if corrected >= left or number >= MOST:
            return corrected, at
    return corrected, None


def _correct(this: Pass, entries: Sequence[OutboxEntry], seen: set[UUID]) -> int:
    """How many of these were wrong; `seen` are those that an earlier window had as well."""
    wrong = [each for each in _wrong(this, entries) if each.entry.pk not in seen]
    seen.update(each.entry.pk for each in wrong)
    if this.dry:
        return len(wrong)
    return sum(
        result_store.correct(this.app, entry, stored=stored, using=this.using)
        for entry, stored in wrong
    )


def _wrong(this: Pass, entries: Sequence[OutboxEntry]) -> Iterator[Wrong]:
    said = result_store.said(entry.pk for entry in entries)
    for entry in entries:
        stored = said.get(entry.pk)
        if _is_ours(this, entry) and _differs(this, entry, stored):
            yield Wrong(entry, stored)


def _differs(this: Pass, entry: OutboxEntry, stored: str | None) -> bool:
    should = told.state(entry)
    if stored is None:
        return (entry.is_final or should == told.UNCERTAIN) and _is_kept(this, entry)
    # While it is open Celery's own words are good enough, but for an end that there was not.
    ends = states.READY_STATES | {told.UNCERTAIN}
    return stored != should and (entry.is_final or stored in ends or should == told.UNCERTAIN)


def _is_ours(this: Pass, entry: Any) -> bool:
    """Not what another code base runs, or stores elsewhere."""
    task = this.app.tasks.get(entry.task)
    return entry.consumer != EXTERNAL and (task is None or result_store.is_ours(task.backend))


def _is_kept(this: Pass, entry: Any) -> bool:
    """Whether Celery would have stored its result, and would still have it."""
    expires = this.app.backend.expires
    if expires and entry.is_final and entry.finished_at < this.began - timedelta(seconds=expires):
        return False
    task = this.app.tasks.get(entry.task)
    if entry.ignored is None and task is None:  # nobody here knows, and plain SQL did not say
        return False
    ignored = task.ignore_result if entry.ignored is None else entry.ignored == "true"
    errors_too = task and task.store_errors_even_if_ignored
    return not ignored or bool(errors_too and told.state(entry) == states.FAILURE)


def _entries(this: Pass) -> EntryQuerySet:
    told_by_options = {
        "ignored": KT("options__ignore_result"),
        "consumer": KT("options__consumer"),
    }
    return OutboxEntry.objects.using(this.using).only(*_COLUMNS).annotate(**told_by_options)


def _ended(this: Pass, since: datetime, until: datetime) -> Iterator[Chunk]:
    rows = _entries(this).filter(status__in=FINAL)
    return _window(rows, "finished_at", since, until, lambda found: found)


def _requeued(this: Pass, since: datetime, until: datetime) -> Iterator[Chunk]:
    """Those that are due anew. A countdown looks alike, and has no result yet."""
    rows = _entries(this).unfinished().filter(due_at__gt=F("created_at"))
    return _window(rows, "due_at", since, until, lambda found: found)


def _written(this: Pass, since: datetime, until: datetime) -> Iterator[Chunk]:
    rows = result_store.rows().only("task_id", "date_done")
    return _window(rows, "date_done", since, until, lambda found: _of_results(this, found))


def _parked(this: Pass) -> Sequence[OutboxEntry]:
    """Those that wait for a person: few, and perhaps no run of them has ever stored a result."""
    rows = _entries(this).filter(status=State.UNCERTAIN).order_by("pk")
    return list(rows[: settings().REPAIRS_PER_PASS])


def _uncertain(this: Pass) -> Sequence[OutboxEntry]:
    """Those of which it is stored: few, and a person's word on them writes no result."""
    rows = result_store.rows().filter(status=told.UNCERTAIN).only("task_id")
    return _of_results(this, rows.order_by("pk")[: settings().REPAIRS_PER_PASS])


def _of_results(this: Pass, results: Sequence[Any]) -> Sequence[OutboxEntry]:
    ids = (as_uuid(result.task_id) for result in results)
    return list(_entries(this).filter(pk__in=[pk for pk in ids if pk is not None]))


def _window(
    rows: QuerySet[Any],
    column: str,
    since: datetime,
    until: datetime,
    entries_of: Callable[[list[Any]], Sequence[OutboxEntry]],
) -> Iterator[Chunk]:
    """The rows of that span, in order of time, some at a time."""
    rows = rows.order_by(column, "pk").filter(**{f"{column}__lte": until})
    at, behind = since, rows
    while found := list(behind.filter(**{f"{column}__gte": at})[:CHUNK]):
        at = getattr(found[-1], column)
        yield entries_of(found), at
        behind = rows.exclude(**{column: at, "pk__lte": found[-1].pk})

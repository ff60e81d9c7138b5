"""Messages in the queues whose entry is not published: adopted, resurrected and alien ones.

The message is seen first and its row read after, so the row may have moved on in between. What
makes each finding safe is that the row's present life began before the look did:

- *adopted*: every step to `pending` sets `publish_after` to its own time or later. A row that is
  pending and whose `publish_after` and `available_at` were past when the look began has been
  pending and due through the whole look, and whoever took the message since would have claimed
  it. The on-commit publisher has its moment until `publish_after`; the dispatcher holds a lock on
  what it is publishing, and locked rows are skipped. Whoever of them comes after compares the
  version, which the adoption has raised. A worker that has taken the message just now claims the
  row from `published` as it would from `pending`. Should it lose the message instead, the row is
  as any other that is published and missing.
- *resurrected*: `finished_at` is before the look began. Else the message was that very run's.
- *alien*: rows are inserted before their message is sent, so no row means that there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.db.models.fields.json import KT

from outbox import transitions
from outbox.brokers import redis
from outbox.brokers.messages import header
from outbox.brokers.redis import Look, Messages
from outbox.conf import default_database, settings
from outbox.lifecycle.publish import DATABASE_HEADER, EXTERNAL
from outbox.lifecycle.reconcile.findings import Pass
from outbox.models import EntryQuerySet, OutboxEntry
from outbox.states import FINAL, State

MOST_BYTES = 33_554_432  # of messages that are kept in mind to be removed in one pass


class Stray(NamedTuple):
    """A message in a list whose entry was not among the published ones."""

    entry_id: UUID
    task: str
    queue: str
    key: str
    raw: bytes


class Row(NamedTuple):
    """What is read of its entry."""

    status: str
    version: int
    task: str
    queue: str
    available_at: datetime
    publish_after: datetime
    finished_at: datetime | None
    consumer: str | None


@dataclass
class Strays:
    """What was found so far."""

    queued: int = 0
    adopted: int = 0
    resurrected: int = 0
    alien: int = 0
    removed: int = 0
    to_remove: list[tuple[Stray, int]] = field(default_factory=list)  # with the row's version
    bytes: int = 0

    def counts(self) -> dict[str, int]:
        names = ("queued", "adopted", "resurrected", "alien", "removed")
        return {name: getattr(self, name) for name in names}


def see(this: Pass, found: Strays, messages: Messages, ids: Sequence[bytes | None]) -> None:
    """Find out what is the matter with those of `messages` that have an ID here."""
    strays = list(_strays(this, messages, ids))
    rows = _rows(this, strays)
    adoptable: set[UUID] = set()
    for stray in strays:
        row = rows.get(stray.entry_id)
        if row is None:
            found.alien += _is_owed(this, stray.task)
        elif row.task == stray.task and _has_ended(this, row):
            found.resurrected += 1
            _keep_for_removal(this, found, stray, row)
        elif row.task == stray.task and _is_waiting(this, row, stray.queue):
            adoptable.add(stray.entry_id)
    found.adopted += _adopt(this, adoptable, left=settings().REPAIRS_PER_PASS - found.adopted)


def remove(this: Pass, found: Strays, look: Look) -> None:
    """Take the messages of entries that have ended out of their lists, where that was asked for.

    After the look, since what goes at the head of a list moves the rest past the next read. The
    rows are held meanwhile: nobody can requeue them.
    """
    if this.dry or not found.to_remove:
        found.removed = len(found.to_remove)
        return
    read = {stray.entry_id: version for stray, version in found.to_remove}
    ended = _entries(this).filter(pk__in=read, status__in=FINAL)
    with transitions.recovering(ended.only("version"), limit=len(read)) as held:
        same = {entry.pk for entry in held if entry.version == read[entry.pk]}
        for stray, _ in found.to_remove:
            if stray.entry_id in same:
                found.removed += redis.remove(look, stray.key, stray.raw)


def _keep_for_removal(this: Pass, found: Strays, stray: Stray, row: Row) -> None:
    fits = len(found.to_remove) < settings().REPAIRS_PER_PASS and found.bytes < MOST_BYTES
    if this.remove and fits:
        found.to_remove.append((stray, row.version))
        found.bytes += len(stray.raw)


def _strays(this: Pass, messages: Messages, ids: Sequence[bytes | None]) -> Iterator[Stray]:
    for raw, one in zip(messages.raws, ids, strict=True):
        if one is None or (header(raw, DATABASE_HEADER) or default_database()) != this.using:
            continue
        task = header(raw, "task")
        if not _is_plain(this, task):
            yield Stray(UUID(bytes=one), task, messages.queue, messages.key, raw)


def _is_plain(this: Pass, task: str) -> bool:
    """A task that this app knows, and whose calls are no entries."""
    known = this.app.tasks.get(task)
    return known is not None and not getattr(known, "is_durable", False)


def _is_owed(this: Pass, task: str) -> bool:
    """A task whose messages all have entries; not so while a team is adopting it."""
    known = this.app.tasks.get(task)
    durable = getattr(known, "is_durable", False)
    return bool(durable) and getattr(known, "unknown_delivery", "drop") == "drop"


def _has_ended(this: Pass, row: Row) -> bool:
    # An external task's entry ends when its message is sent.
    if row.finished_at is None or row.consumer == EXTERNAL:
        return False
    return row.finished_at < this.began


def _is_waiting(this: Pass, row: Row, queue: str) -> bool:
    """Pending, and due before the look began; and in its own queue, where its workers are."""
    due = max(row.available_at, row.publish_after)
    return row.status == State.PENDING and due <= this.began and row.queue == queue


def _adopt(this: Pass, ids: set[UUID], *, left: int) -> int:
    if not ids or left <= 0:
        return 0
    rows = _entries(this).filter(
        pk__in=ids, available_at__lte=this.began, publish_after__lte=this.began
    )
    if this.dry:
        return rows.filter(status=State.PENDING)[:left].count()
    return transitions.adopt(rows, limit=left)


def _rows(this: Pass, strays: Sequence[Stray]) -> Mapping[UUID, Row]:
    columns: list[Any] = ["pk", *Row._fields[:-1], KT("options__consumer")]
    rows = _entries(this).filter(pk__in={stray.entry_id for stray in strays})
    return {pk: Row(*values) for pk, *values in rows.values_list(*columns)}


def _entries(this: Pass) -> EntryQuerySet:
    return OutboxEntry.objects.using(this.using).all()

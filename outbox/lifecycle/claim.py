"""claim: a delivery is a hint; the row decides whether it runs, and with which arguments."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

from django.db import transaction

from outbox import payload, transitions
from outbox.events import Note
from outbox.failpoints import Failpoint, reach
from outbox.lifecycle import lease
from outbox.models import OutboxEntry
from outbox.outage import until_answered
from outbox.states import FINAL, State
from outbox.worker import identity, pools

if TYPE_CHECKING:
    from outbox.tasks import OutboxTask

logger = logging.getLogger("outbox")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A run that this process owns until its lease runs out."""

    id: UUID
    task: str
    args: list[Any]
    kwargs: dict[str, Any]
    options: dict[str, Any]
    queue: str
    priority: int
    token: UUID
    attempts: int
    failures: int
    forgiven_failures: int
    failure_limit: int | None
    deadline_at: datetime | None
    subject: str
    owner: str
    root_id: UUID | None
    parent_id: UUID | None
    using: str

    @property
    def retries(self) -> int:
        """Celery's retry count: the failures since it was enqueued or last requeued."""
        return self.failures - self.forgiven_failures


class Discard(StrEnum):
    """Why a delivery runs nothing."""

    DUPLICATE = "duplicate"  # somebody runs it
    FINISHED = "finished"
    CANCELLED = "cancelled"
    EARLY = "early"  # it waits for its time; the dispatcher will publish it then
    PARKED = "parked"
    EXPIRED = "expired"
    OTHER_TASK = "other task"  # the row with this ID is another task's
    UNKNOWN = "unknown"  # no row


def take(
    task: OutboxTask,
    entry_id: UUID,
    args: Any,
    kwargs: Any,
    *,
    using: str,
    stopping: Callable[[], bool],
) -> Claim | Discard:
    """Claim the entry for this delivery, waiting while the database is away.

    Raises:
        OperationalError, InterfaceError: the worker stops while the database is away.
    """
    token = uuid4()  # drawn once for the delivery: a claim whose reply was lost is repeated

    def claim() -> Claim | None:
        return _claim(task, entry_id, token=token, using=using)

    found = until_answered(claim, using=using, what="claiming", give_up=stopping)
    if found is None:
        why = until_answered(
            lambda: _why_not(task, entry_id, using=using), using=using, what="claiming"
        )
        if why is Discard.UNKNOWN and task.unknown_delivery == "adopt":
            until_answered(
                lambda: _adopt(task, entry_id, args, kwargs, using=using),
                using=using,
                what="adopting",
                give_up=stopping,
            )
            found = until_answered(claim, using=using, what="claiming", give_up=stopping)
        if found is None:
            return why
    reach(Failpoint.CLAIMED)
    return found


def _claim(task: OutboxTask, entry_id: UUID, *, token: UUID, using: str) -> Claim | None:
    row = transitions.claim(
        entry_id,
        task=task.name,
        token=token,
        owner=identity.BOOT,
        pid=os.getpid(),
        lease=pools.lease(),
        synced=task.on_crash != "retry",
        # One message to an owner at a time: while the mail server is down, no second one begins.
        keep_unique=task.name == transitions.TELL_OWNER,
        using=using,
    )
    if row is None:
        return None
    for column in ("args", "kwargs", "options"):
        row[column] = payload.loads(row[column])
    row["token"] = row.pop("claim_token")
    return Claim(**row, using=using)


def _why_not(task: OutboxTask, entry_id: UUID, *, using: str) -> Discard:
    with transaction.atomic(using=using):
        rows = OutboxEntry.objects.using(using).filter(pk=entry_id)
        with transitions.recovering(rows.too_late().filter(task=task.name), limit=1) as late:
            for entry in late:
                transitions.expire(entry, note=Note("claim", lease.why_late(entry)))
        if late:
            return Discard.EXPIRED
        found = rows.only("task", "status").first()
    return Discard.UNKNOWN if found is None else _reason(task, found)


def _reason(task: OutboxTask, entry: OutboxEntry) -> Discard:
    if entry.task != task.name:
        return Discard.OTHER_TASK
    if entry.status == State.CANCELLED:
        return Discard.CANCELLED
    if entry.status in FINAL:
        return Discard.FINISHED
    waiting = {State.UNCERTAIN.value: Discard.PARKED, State.RUNNING.value: Discard.DUPLICATE}
    return waiting.get(entry.status, Discard.EARLY)


def _adopt(task: OutboxTask, entry_id: UUID, args: Any, kwargs: Any, *, using: str) -> None:
    """While a team is adopting: a plain message becomes an entry, under its own ID."""
    row = {
        "id": entry_id,
        "task": task.name,
        "args": payload.dumps(list(args or ())),
        "kwargs": payload.dumps(dict(kwargs or {})),
        "options": payload.dumps(task.row_options()),
        "owner": task.owner or "",
        "crash_limit": task.max_crashes,
    }
    transitions.enqueue(transitions.plain_row(row), using=using)
    logger.info("outbox.entry.adopted entry_id=%s task=%s", entry_id, task.name)

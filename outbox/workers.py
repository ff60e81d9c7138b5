"""The rows of live workers: a heartbeat, the queues, and what each holds prefetched."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django.db.models import BooleanField, Exists, F, Func, OuterRef, TextField
from django.db.models.functions import Cast, Now

from outbox.clock import as_uuid
from outbox.conf import settings
from outbox.models import EntryQuerySet, OutboxQueue, OutboxWorker
from outbox.worker import counts, identity


def beat(worker: Any, *, holds: Sequence[str], using: str) -> None:
    """Say that this boot of a worker is alive, and what it has not run."""
    facts = {
        "queues": sorted(worker.app.amqp.queues.consume_from),
        "holds": list(holds),
        "refused": counts.so_far(),
        "heartbeat_at": Now(),
    }
    if not _mine(using).update(**facts):
        row = OutboxWorker(
            id=identity.BOOT,
            hostname=str(worker.hostname),
            pid=os.getpid(),
            pool=worker.pool_cls.__module__.rpartition(".")[2],
            **facts,
        )
        OutboxWorker.objects.using(using).bulk_create([row], ignore_conflicts=True)


def held_by_the_living(*, using: str) -> set[bytes]:
    """The IDs, 16 bytes each, that live workers say they hold: received, and not settled."""
    holds = _living(using).values_list("holds", flat=True)
    ids = (as_uuid(text) for held in holds for text in held)
    return {found.bytes for found in ids if found is not None}


def consumed(*, using: str) -> set[str]:
    """The queues that live workers say they consume."""
    return {name for names in _living(using).values_list("queues", flat=True) for name in names}


def moving(*, using: str) -> set[str]:
    """The queues that live workers consume, and that nobody has paused."""
    paused = OutboxQueue.objects.using(using).filter(paused=True).values_list("name", flat=True)
    return consumed(using=using).difference(paused)


def moving_queue(name: str, *, using: str) -> str:
    """That queue, where it moves, or none does; else one that moves."""
    known = moving(using=using)
    return name if name in known or not known else min(known)


def without_living_owner(rows: EntryQuerySet) -> EntryQuerySet:
    """Of these runs, those whose owner does not say that it lives and holds them.

    A run that its owner could not renew, since somebody locked the row, has not crashed.
    """
    held = Func(F("holds"), Cast(OuterRef("pk"), TextField()), function="jsonb_exists")
    held.output_field = BooleanField()
    owner = _living(rows.db).filter(held, pk=OuterRef("lease_owner"))
    return rows.exclude(Exists(owner))


def _living(using: str) -> Any:
    alive = timedelta(seconds=settings().LEASE)
    return OutboxWorker.objects.using(using).filter(
        stopped_at__isnull=True, heartbeat_at__gte=Now() - alive
    )


def sign_off(*, using: str) -> None:
    """Say that it has stopped, and holds nothing any more."""
    _mine(using).update(stopped_at=Now(), holds=[])


def _mine(using: str) -> Any:
    return OutboxWorker.objects.using(using).filter(pk=identity.BOOT)

"""What the database says of how the outbox is doing, all of it as of one moment.

The cost is bound by what is open, never by what is kept: ended entries are counted up to
`LOOKED_AT` of each state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connections
from django.db.models import Count, Max, Min, Q, Value

from outbox import ticks
from outbox.conf import settings
from outbox.lifecycle.publish import EXTERNAL
from outbox.models import (
    OutboxEntry,
    OutboxEvent,
    OutboxQueue,
    OutboxTick,
    OutboxWorker,
    own_seconds,
)
from outbox.states import FINAL, OPEN, State

LOOKED_AT = 100_000  # ended entries of a state


@dataclass(frozen=True)
class Standing:
    """What was read, all of it as of `at`."""

    at: datetime
    open: Sequence[Mapping[str, Any]]  # a row for each queue and state
    ended: Mapping[str, int]
    queues: Sequence[OutboxQueue]
    ticks: Mapping[str, OutboxTick]
    workers: Sequence[OutboxWorker]  # the living
    knows_workers: bool  # whether any has ever said that it lives
    asked_since: datetime | None  # when the oldest that waits for a person began to

    def sum(self, column: str, *states: State) -> int:
        """The sum of a column over the open rows, or over those of `states`."""
        return sum(row[column] for row in self.open if not states or row["status"] in states)

    def oldest(self, column: str) -> float | None:
        """Seconds since the earliest time in that column."""
        times = [row[column] for row in self.open if row[column] is not None]
        return seconds(self.at, min(times)) if times else None


def read(*, using: str) -> Standing:
    """Look at the database of that alias.

    Raises:
        DatabaseError, InterfaceError: it is away.
    """
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT STATEMENT_TIMESTAMP()")
        (at,) = cursor.fetchone()
    return Standing(
        at=at,
        open=_open(at, using=using),
        ended=_ended(at, using=using),
        queues=list(OutboxQueue.objects.using(using).filter(paused=True).order_by("name")),
        ticks=_ticks(using=using),
        workers=_living(at, using=using),
        knows_workers=OutboxWorker.objects.using(using).exists(),
        asked_since=_asked_since(using=using),
    )


def _open(at: datetime, *, using: str) -> list[dict[str, Any]]:
    due = Q(status=State.PENDING, available_at__lte=at)
    own = own_seconds("over_age", settings().OVER_AGE)
    lease = timedelta(seconds=settings().LEASE)
    rows = OutboxEntry.objects.using(using).filter(status__in=OPEN).values("queue", "status")
    found = rows.annotate(
        entries=Count("pk"),
        due=Count("pk", filter=due),
        oldest_due=Min("available_at", filter=due),
        oldest_owed=Min("due_at", filter=Q(due_at__lte=at)),
        oldest_published=Min("published_at", filter=Q(status=State.PUBLISHED)),
        over_age=Count("pk", filter=Q(due_at__lt=Value(at) - own)),
        # For a lease, in which a worker that restarts has come back. Another code base's workers
        # say nothing of themselves.
        unclaimed=Count(
            "pk", filter=_waits_since(at - lease) & ~Q(options__contains={"consumer": EXTERNAL})
        ),
        # A sweep waits until the database has been up for a whole lease.
        lapsed=Count("pk", filter=Q(status=State.RUNNING, lease_until__lt=at - lease)),
    )
    return [dict(row) for row in found.order_by("queue", "status")]


def _asked_since(*, using: str) -> datetime | None:
    events = OutboxEvent.objects.using(using).parking()
    waiting = events.filter(entry__status=State.UNCERTAIN).values("entry")
    # An entry may have waited before, and been resolved.
    last: datetime | None = waiting.annotate(last=Max("at")).aggregate(at=Min("last"))["at"]
    return last


def _waits_since(moment: datetime) -> Q:
    due = Q(status=State.PENDING, available_at__lt=moment)
    return due | Q(status=State.PUBLISHED, published_at__lt=moment)


def _ended(at: datetime, *, using: str) -> dict[str, int]:
    """How many ended in each state, as far as that is looked at, and failed in the last hour."""
    rows = OutboxEntry.objects.using(using)
    found = {str(state): rows.filter(status=state)[:LOOKED_AT].count() for state in FINAL}
    last = rows.filter(status__in=FINAL, finished_at__gt=at - timedelta(hours=1))
    lately = Count("pk", filter=Q(status=State.FAILED))
    # The last to end: an index has them in that order, and none has the failed ones by time.
    return found | last.order_by("-finished_at")[:LOOKED_AT].aggregate(lately=lately)


def _ticks(*, using: str) -> dict[str, OutboxTick]:
    ran = {tick.name: tick for tick in OutboxTick.objects.using(using).all()}
    return {name: ran.get(name, OutboxTick(name=name, findings={})) for name in ticks.NAMES}


def _living(at: datetime, *, using: str) -> list[OutboxWorker]:
    since = at - timedelta(seconds=settings().LEASE)
    rows = OutboxWorker.objects.using(using).filter(stopped_at=None, heartbeat_at__gt=since)
    return list(rows.defer("holds").order_by("hostname", "started_at"))


def seconds(at: datetime, since: datetime) -> float:
    """From `since` until `at`, never less than nothing."""
    return round(max(0.0, (at - since).total_seconds()), 3)

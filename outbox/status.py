"""How the outbox is doing: numbers from the database, and in words what is wrong and what to do.

Its cost is bound by what is open, never by what is kept: ended entries are counted up to
`LOOKED_AT` of each state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from celery import Celery
from django.db import connections
from django.db.models import Count, DurationField, Min, Q, Value
from django.db.models.expressions import RawSQL
from django.db.models.functions import Coalesce

from outbox import ticks
from outbox.brokers import ping
from outbox.conf import settings
from outbox.models import OutboxEntry, OutboxQueue, OutboxTick, OutboxWorker
from outbox.states import FINAL, OPEN, State
from outbox.words import counted, span

VERSION = 1  # of the JSON; it grows when a key changes its meaning or goes
LOOKED_AT = 100_000  # ended entries of a state
LATE_AFTER = 10  # rounds that a tick may miss
_SHORTEST = 10.0  # seconds: no tick is late before that

# The task's own `over_age`, in seconds, which enqueue wrote into the options. Raw: the ORM has no
# cast from jsonb text to an interval.
_OWN_OVER_AGE = RawSQL(
    "(options ->> 'over_age')::float8 * interval '1 second'", (), output_field=DurationField()
)


@dataclass(frozen=True)
class Problem:
    """Something that a person should see to. The code is stable, the message is for people."""

    code: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Queue:
    """The open entries of one queue."""

    name: str
    pending: int = 0
    due: int = 0  # pending, and its time has come
    published: int = 0
    running: int = 0
    oldest_due_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A maintenance tick's last run."""

    name: str
    last_at: datetime | None = None
    duration_seconds: float | None = None
    findings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Status:
    """What `outbox_status` shows; the attributes are the keys of its JSON."""

    version: int
    at: datetime
    healthy: bool
    problems: Sequence[Problem]
    counts: Mapping[str, int]
    queues: Sequence[Queue]
    oldest_unfinished_seconds: float | None
    oldest_published_seconds: float | None
    workers: int
    ticks: Sequence[Tick]

    def as_json(self) -> dict[str, Any]:
        """The same as plain dicts and lists; times in ISO 8601."""
        return _plain(asdict(self))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Facts:
    """What was read, all of it as of `at`."""

    at: datetime
    open: Sequence[Mapping[str, Any]]  # a row for each queue and state
    ended: Mapping[str, int]
    queues: Sequence[OutboxQueue]
    ticks: Mapping[str, OutboxTick]
    workers: int

    def sum(self, column: str, *states: State) -> int:
        """The sum of a column over the open rows, or over those of `states`."""
        return sum(row[column] for row in self.open if not states or row["status"] in states)

    def oldest(self, column: str) -> float | None:
        """Seconds since the earliest time in that column."""
        times = [row[column] for row in self.open if row[column] is not None]
        return _seconds(self.at, min(times)) if times else None


def read(app: Celery, *, using: str) -> Status:
    """Look at the database of that alias, and whether the broker answers.

    Raises:
        DatabaseError, InterfaceError: the database is away.
    """
    facts = _facts(using=using)
    problems = [*_problems(facts), *_broker_problems(app)]
    return Status(
        version=VERSION,
        at=facts.at,
        healthy=not problems,
        problems=problems,
        counts=_counts(facts),
        queues=list(_queues(facts)),
        oldest_unfinished_seconds=facts.oldest("oldest_owed"),
        oldest_published_seconds=facts.oldest("oldest_published"),
        workers=facts.workers,
        ticks=[_tick(tick) for tick in facts.ticks.values()],
    )


# --- reading ------------------------------------------------------------------------------------


def _facts(*, using: str) -> _Facts:
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT STATEMENT_TIMESTAMP()")
        (at,) = cursor.fetchone()
    return _Facts(
        at=at,
        open=_open(at, using=using),
        ended=_ended(at, using=using),
        queues=list(OutboxQueue.objects.using(using).filter(paused=True).order_by("name")),
        ticks=_ticks(using=using),
        workers=_living(at, using=using),
    )


def _open(at: datetime, *, using: str) -> list[dict[str, Any]]:
    due = Q(status=State.PENDING, available_at__lte=at)
    own = Coalesce(_OWN_OVER_AGE, Value(timedelta(seconds=settings().OVER_AGE)))
    lease = timedelta(seconds=settings().LEASE)
    rows = OutboxEntry.objects.using(using).filter(status__in=OPEN).values("queue", "status")
    found = rows.annotate(
        entries=Count("pk"),
        due=Count("pk", filter=due),
        oldest_due=Min("available_at", filter=due),
        oldest_owed=Min("due_at", filter=Q(due_at__lte=at)),
        oldest_published=Min("published_at", filter=Q(status=State.PUBLISHED)),
        over_age=Count("pk", filter=Q(due_at__lt=Value(at) - own)),
        # A sweep waits until the database has been up for a whole lease.
        lapsed=Count("pk", filter=Q(status=State.RUNNING, lease_until__lt=at - lease)),
    )
    return [dict(row) for row in found.order_by("queue", "status")]


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


def _living(at: datetime, *, using: str) -> int:
    since = at - timedelta(seconds=settings().LEASE)
    rows = OutboxWorker.objects.using(using).filter(stopped_at=None, heartbeat_at__gt=since)
    return rows.count()


# --- showing ------------------------------------------------------------------------------------


def _counts(facts: _Facts) -> dict[str, int]:
    return {
        state.value: facts.ended[state] if state in FINAL else facts.sum("entries", state)
        for state in State
    }


def _queues(facts: _Facts) -> Iterator[Queue]:
    for name in sorted({row["queue"] for row in facts.open}):
        rows = {row["status"]: row for row in facts.open if row["queue"] == name}
        pending = rows.get(State.PENDING, {})
        oldest = pending.get("oldest_due")
        yield Queue(
            name=name,
            pending=pending.get("entries", 0),
            due=pending.get("due", 0),
            published=rows.get(State.PUBLISHED, {}).get("entries", 0),
            running=rows.get(State.RUNNING, {}).get("entries", 0),
            oldest_due_seconds=None if oldest is None else _seconds(facts.at, oldest),
        )


def _tick(tick: OutboxTick) -> Tick:
    took = None if tick.duration is None else round(tick.duration.total_seconds(), 3)
    return Tick(name=tick.name, last_at=tick.last_at, duration_seconds=took, findings=tick.findings)


def _seconds(at: datetime, since: datetime) -> float:
    return round(max(0.0, (at - since).total_seconds()), 3)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.isoformat() if isinstance(value, datetime) else value


# --- judging ------------------------------------------------------------------------------------


def _problems(facts: _Facts) -> Iterator[Problem]:
    yield from _paused(facts.queues)
    yield from _late_ticks(facts)
    yield from _lapsed(facts.sum("lapsed"))
    yield from _over_age(facts.sum("over_age"))
    yield from _waiting(facts.sum("entries", State.UNCERTAIN))
    yield from _failed(facts.ended["lately"])


def _paused(queues: Iterable[OutboxQueue]) -> Iterator[Problem]:
    if settings().PAUSED:
        yield Problem(
            "paused", "Nothing is published: OUTBOX['PAUSED'] is set. Remove it to go on."
        )
    for queue in queues:
        who = f" by {queue.paused_by}" if queue.paused_by else ""
        yield Problem(
            "queue_paused", f"The queue {queue.name} was paused{who}: its entries stay pending."
        )


def _late_ticks(facts: _Facts) -> Iterator[Problem]:
    every = {
        ticks.DISPATCH: settings().DISPATCH_EVERY,
        ticks.RECONCILE: settings().RECONCILE_EVERY,
    }
    advice = {
        ticks.DISPATCH: "Nobody publishes what is due: start celery-beat with beat_schedule() and "
        "a worker, or manage.py outbox_dispatcher.",
        ticks.RECONCILE: "Nobody looks for lost messages: start celery-beat with beat_schedule() "
        "and a worker, or run manage.py outbox_reconcile.",
    }
    for name, seconds in every.items():
        last = facts.ticks[name].last_at
        late = None if last is None else _seconds(facts.at, last)
        if late is None or late > max(LATE_AFTER * seconds, _SHORTEST):
            when = "has never run" if late is None else f"ran {span(late)} ago"
            yield Problem(f"{name}_late", f"The {name} tick {when}. {advice[name]}")


def _lapsed(count: int) -> Iterator[Problem]:
    if count:
        runs = "1 run has" if count == 1 else f"{count:,} runs have"
        yield Problem(
            "lease_expired",
            f"{runs} outlived the lease by another and nobody has recovered them: see that the "
            "dispatch tick runs.",
        )


def _over_age(count: int) -> Iterator[Problem]:
    if count:
        entries = "1 entry has" if count == 1 else f"{count:,} entries have"
        yield Problem(
            "over_age",
            f"{entries} been owed for longer than allowed ({span(settings().OVER_AGE)}, or the "
            "task's over_age). See that a worker consumes the queues below; the admin has the "
            "oldest first under Unfinished.",
        )


def _waiting(count: int) -> Iterator[Problem]:
    if count:
        waits = "1 entry waits" if count == 1 else f"{count:,} entries wait"
        yield Problem(
            "waiting_for_person",
            f"{waits} for a person: an effect outside may or may not have happened. Look, then "
            "settle with outbox.resolve(), or cancel.",
        )


def _failed(count: int) -> Iterator[Problem]:
    if count:
        yield Problem(
            "failed_lately",
            f"{counted(count, 'entry', 'entries')} failed for good in the last hour. The error "
            "is in the admin; retry there or with manage.py outbox_requeue ID.",
        )


def _broker_problems(app: Celery) -> Iterator[Problem]:
    if why := ping.why_unreachable(app):
        yield Problem(
            "broker_unreachable",
            f"The broker does not answer: {why} Nothing is lost; entries are published when it "
            "is back.",
        )

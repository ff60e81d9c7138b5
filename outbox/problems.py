"""What is wrong with the outbox, and what to do next. The codes are stable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from celery import Celery

from outbox import ticks
from outbox.brokers import ping
from outbox.conf import settings
from outbox.models import OutboxQueue
from outbox.standing import Standing, seconds
from outbox.states import State
from outbox.words import counted, span

LATE_AFTER = 10  # rounds that a tick may miss
_SHORTEST = 10.0  # seconds: no tick is late before that


@dataclass(frozen=True)
class Problem:
    """Something that a person should see to. The code is stable, the message is for people."""

    code: str
    message: str


def of(found: Standing, *, app: Celery) -> Iterator[Problem]:
    """The problems, the ones that stop everything first. Asks whether the broker answers."""
    yield from _paused(found.queues)
    yield from _late_ticks(found)
    yield from _failed_ticks(found)
    yield from _lapsed(found.sum("lapsed"))
    yield from _unconsumed(found)
    yield from _over_age(found.sum("over_age"))
    yield from _waiting(found)
    yield from _failed(found.ended["lately"])
    yield from _unread(found.ticks[ticks.RECONCILE].findings)
    yield from _broker(app)


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


def _late_ticks(found: Standing) -> Iterator[Problem]:
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
    for name, pause in every.items():
        last = found.ticks[name].last_at
        late = None if last is None else (found.at - last).total_seconds()
        # Far in the future as well: the database's clock was set back, and none has run since.
        if late is None or abs(late) > max(LATE_AFTER * pause, _SHORTEST):
            when = "has never run" if late is None else f"ran {_when(late)}"
            yield Problem(f"{name}_late", f"The {name} tick {when}. {advice[name]}")


def _when(late: float) -> str:
    return f"{span(late)} ago" if late > 0 else f"{span(-late)} in the future"


def _failed_ticks(found: Standing) -> Iterator[Problem]:
    for name, tick in found.ticks.items():
        if why := tick.findings.get("failed"):
            yield Problem(
                "tick_failed",
                f"A part of the last {name} tick failed, and does so each time until somebody "
                f"mends it: {why}",
            )


def _lapsed(count: int) -> Iterator[Problem]:
    if count:
        runs = "1 run has" if count == 1 else f"{count:,} runs have"
        yield Problem(
            "lease_expired",
            f"{runs} outlived the lease by another and nobody has recovered them: see that the "
            "dispatch tick runs.",
        )


def _unconsumed(found: Standing) -> Iterator[Problem]:
    """Only where there have been workers that say what they consume: else nobody knows."""
    if not found.knows_workers:
        return
    consumed = {name for worker in found.workers for name in worker.queues}
    waiting: dict[str, int] = {}
    for row in found.open:
        if row["unclaimed"] and row["queue"] not in consumed:
            waiting[row["queue"]] = waiting.get(row["queue"], 0) + row["unclaimed"]
    for queue, count in sorted(waiting.items()):
        yield Problem(
            "queue_without_consumer",
            f"No live worker consumes the queue {queue}, in which "
            f"{counted(count, 'entry waits', 'entries wait')}: start one with -Q {queue}.",
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


def _waiting(found: Standing) -> Iterator[Problem]:
    if count := found.sum("entries", State.UNCERTAIN):
        waits = "1 entry waits" if count == 1 else f"{count:,} entries wait"
        oldest = ""
        if found.asked_since:
            since = span(seconds(found.at, found.asked_since))
            oldest = f", for {since}" if count == 1 else f", the oldest for {since}"
        yield Problem(
            "waiting_for_person",
            f"{waits} for a person{oldest}: an effect outside may or may not have happened. Look "
            "there, then say in the admin which it was (or with outbox.resolve()), or cancel.",
        )


def _failed(count: int) -> Iterator[Problem]:
    if count:
        yield Problem(
            "failed_lately",
            f"{counted(count, 'entry', 'entries')} failed for good in the last hour. The error "
            "is in the admin; retry there or with manage.py outbox_requeue ID.",
        )


def _unread(findings: Mapping[str, Any]) -> Iterator[Problem]:
    """Of the broker, or of some queues, by the last pass."""
    if why := findings.get("broker") or findings.get("skipped"):
        yield Problem(
            "broker_unread",
            f"{why} The last reconcile tick could not look for lost messages there: see the "
            "broker's ACL, and what else uses that key.",
        )


def _broker(app: Celery) -> Iterator[Problem]:
    if why := ping.why_unreachable(app):
        yield Problem(
            "broker_unreachable",
            f"The broker does not answer: {why} Nothing is lost; entries are published when it "
            "is back.",
        )

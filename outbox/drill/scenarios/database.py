"""PostgreSQL goes away, forgets, answers into the void, or keeps a row locked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from django.db import transaction

from outbox.drill import tasks
from outbox.drill.environment import TIMES, database_variables
from outbox.drill.proxy import Proxy
from outbox.drill.record import Job
from outbox.drill.scenarios.point import Given, Point, Wants, once, own
from outbox.drill.stage import Stage
from outbox.events import LATE
from outbox.failpoints import Failpoint
from outbox.sql import CLAIM, SUCCEED
from outbox.states import FINAL, State

MANY = 2_000
AWAY = "outbox.database.away"


def row_locked_during_renewal(stage: Stage) -> None:
    with stage.hanging_destination() as behave:
        stage.start()
        stage.place()
        stage.place()
        stage.await_hanging(runs=2)
        locked, other = stage.jobs()
        with stage.means.database.row_locked(locked.id):
            stage.strike()
            least = _watch_renewals(stage, locked=locked.id, other=other)
        stage.let_pass()  # a sweep may look at the row now
        behave("ok")
        stage.await_end()
    stage.note(other_lease_held=least > 0)


def _watch_renewals(stage: Stage, *, locked: UUID, other: Job) -> float:
    """Until the locked row's lease is past, and the other's was renewed by more than one lease.

    How much of the other's was left at the worst moment, in seconds.
    """
    left: list[float] = []

    def over() -> bool:
        jobs = {job.id: job.lease_until for job in stage.jobs()}
        until, held = jobs[locked], jobs[other.id]
        now = stage.means.database.now()
        left.append((held - now).total_seconds() if held else -1.0)
        further = held and other.lease_until and held - other.lease_until
        return bool(until and until < now and further and further.total_seconds() > TIMES["LEASE"])

    stage.until(over, what="a lease to pass while its row is locked", who="worker")
    return min(left)


def database_restarts_mid_run(stage: Stage) -> None:
    with stage.hanging_destination() as behave:
        stage.start()
        stage.place()
        stage.place()
        stage.await_hanging(runs=2)
        with _away(stage):
            pass
        stage.await_renewals(seconds=1.5)
        stage.let_pass()
        behave("ok")
        stage.await_end()


def database_gone_at_completion(stage: Stage) -> None:
    stage.start({"worker": stage.stop_at(Failpoint.RETURNED)})
    stage.place()
    stage.await_stop("worker", at=Failpoint.RETURNED)
    with _away(stage):
        stage.let_go(Failpoint.RETURNED)
        stage.await_log(AWAY, who="worker")
    stage.await_end()


def database_killed_after_claim(stage: Stage) -> None:
    """The claim is all that is not on the disk; its message comes again while its run stands."""
    stage.start({"worker": stage.stop_at(Failpoint.DELIVERED, Failpoint.CLAIMED)})
    stage.owe(tasks.touch_atomically)
    stage.await_stop("worker", at=Failpoint.DELIVERED)
    stage.await_state(State.PUBLISHED)
    database, broker = stage.means.database, stage.means.broker
    with database.unsynced():
        stage.let_go(Failpoint.DELIVERED)
        stage.await_stop("worker", at=Failpoint.CLAIMED)
        stage.note(claimed_before=stage.job().attempts)
        stage.means.say("killing PostgreSQL")
        stage.strike()
        database.kill()
    stage.note(claimed_after=stage.job().attempts)
    broker.restore(stage.job().id)
    stage.await_end()
    stage.let_go(Failpoint.CLAIMED)
    stage.await_event(LATE)
    stage.let_pass()


def database_gone_at_claim(stage: Stage) -> None:
    stage.start_without_worker()
    with transaction.atomic():
        for _ in range(MANY):
            # Not due at its commit: the dispatcher alone publishes it, and so just once.
            stage.owe(tasks.touch, countdown=0.1)
    queue, broker = stage.job().queue, stage.means.broker
    stage.until(
        lambda: stage.count(State.PUBLISHED) == MANY,
        what="all to be published",
        who="dispatcher",
    )
    with _away(stage):
        stage.start_only({"worker": {}})
        stage.await_log(f"{AWAY} while claiming", who="worker", times=2)
        waiting, held = broker.holds(queue)
        stage.note(messages_while_it_was_away=waiting + held, some_were_taken=held > 0)
    stage.until(lambda: stage.count(*FINAL) == MANY, what="all to end", who="worker")
    stage.let_pass()


def commit_reply_lost(stage: Stage) -> None:
    server = stage.means.database.server
    proxy = Proxy("127.0.0.1", server.port)
    with proxy.running():
        url = server.url.replace(f":{server.port}/", f":{proxy.port}/")
        stage.start({"worker": database_variables(url)})
        for statement in (CLAIM, SUCCEED):
            proxy.swallow(statement.partition("%(")[0])
            stage.strike()
            stage.owe(tasks.touch)
            stage.until(lambda: not proxy.armed, what="the statement to pass", who="worker")
            stage.await_end()
        stage.fleet.stop("worker")
    stage.note(replies_swallowed=proxy.swallowed)


@contextmanager
def _away(stage: Stage) -> Iterator[None]:
    """Stop PostgreSQL, and start it again at the end."""
    stage.means.say("stopping PostgreSQL")
    stage.strike()
    stage.means.database.stop()
    try:
        yield
    finally:
        stage.means.say("starting PostgreSQL")
        stage.means.database.start()


def _lost_connection(given: Given, *, jobs: int) -> Wants:
    """A body that is atomic is rolled back with its connection: it is released and runs again."""
    again = given.kind == "atomic"
    counts = dict.fromkeys(("business", "jobs", "effects", "keys"), jobs)
    return once(killed=[], attempts=1 + again, releases=int(again), **counts)


POINTS = (
    Point(
        name="row-locked-during-renewal",
        summary="hold one running job's row locked for longer than its lease",
        expected=(
            "the other job's lease is renewed all the while; both end with one attempt, no crash "
            "and one {effect} each"
        ),
        play=row_locked_during_renewal,
        wants=lambda given: once(
            killed=[], business=2, jobs=2, effects=2, keys=2, other_lease_held=True
        ),
        risk="none known; what holds a row delays the writes to that row, and to no other",
    ),
    Point(
        name="database-restarts-mid-run",
        summary="restart PostgreSQL while the destination keeps two runs waiting",
        expected="the leases are renewed when it is back; one attempt, no crash, one {effect} each",
        play=database_restarts_mid_run,
        wants=lambda given: _lost_connection(given, jobs=2),
        risk="none known; nothing starts while the database is away",
    ),
    Point(
        name="database-gone-at-completion",
        summary="stop PostgreSQL after the effect, before its completion is recorded",
        expected="the end is recorded when it is back; one attempt, no crash, one {effect}",
        play=database_gone_at_completion,
        wants=lambda given: _lost_connection(given, jobs=1),
        risk=(
            "a worker that dies before the database is back leaves what after-effect leaves: the "
            "{effect} happened, and the record does not know"
        ),
    ),
    Point(
        name="database-killed-after-claim",
        summary="SIGKILL PostgreSQL before a claim is on the disk, and deliver the job again",
        expected=(
            "the claim is forgotten; the second run ends the job, the first one's end is refused; "
            "counted as one attempt, and the effect in the database happened once"
        ),
        play=database_killed_after_claim,
        wants=lambda given: own(
            claimed_before=1, claimed_after=0, late_events=1, discarded=0, deliveries=2
        ),
        uncertain="by the claim's random token: the forgotten run no longer had the job's",
        risk="an effect outside the database would have happened twice, under one key",
    ),
    Point(
        name="database-gone-at-claim",
        summary="stop PostgreSQL while 2,000 jobs wait in the broker, and start a worker",
        expected=(
            "no message is acknowledged while it is away; when it is back each of the 2,000 jobs "
            "has one attempt and one effect"
        ),
        play=database_gone_at_claim,
        wants=lambda given: own(
            jobs=MANY,
            effects=MANY,
            keys=MANY,
            messages_while_it_was_away=MANY,
            some_were_taken=True,
        ),
        risk="none known",
    ),
    Point(
        name="commit-reply-lost",
        summary="cut the connection once a claim, and then an end, has committed, before the reply",
        expected="both are repeated and counted once; one attempt, no failure, one effect each",
        play=commit_reply_lost,
        wants=lambda given: own(
            jobs=2, effects=2, keys=2, late_events=0, replies_swallowed=["UPDATE 1", "UPDATE 1"]
        ),
        risk="none known",
    ),
)

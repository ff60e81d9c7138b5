"""Jobs that are hard to publish: unreadable, committed out of order, or with the broker away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import psycopg

from outbox.clock import new_id
from outbox.drill import record, tasks
from outbox.drill.fleet import Name
from outbox.drill.scenarios.point import Point, once, own
from outbox.drill.stage import Stage
from outbox.states import State
from outbox.ticks import DISPATCH

#: Each is refused by another step on the way to a message. The second looks like a date of kombu's.
UNREADABLE = (
    ("""{"no": "array"}""", "{}"),
    ("[]", """{"headers": {"day": {"__type__": "date", "__value__": "no date"}}}"""),
    ("[]", """["no object"]"""),
)
BEHIND = 4

#: A worker with these publishes for no dispatcher that is late, so that what is seen is the
#: dispatcher's own doing.
NO_TICKER = {"DISPATCH_EVERY": 600, "LEASE": 1800, "STRAND_GRACE": 1200}
_INSERT = """
INSERT INTO celery_outbox_entry (id, task, args, options, available_at)
VALUES (%s, %s, %s, %s, STATEMENT_TIMESTAMP() - interval '1 hour')
"""


def poison_row(stage: Stage) -> None:
    stage.start()
    before = stage.fleet.pid("dispatcher")
    rows = [*UNREADABLE, *[("[]", "{}")] * BEHIND]
    with stage.means.database.transaction() as session:
        for args, options in rows:
            _insert(stage, session, new_id(), args, options)
    stage.await_end()
    poison = stage.jobs()[: len(UNREADABLE)]
    what = "the owner to be told of each"
    stage.until(
        lambda: all(record.owner_is_told(job.id) for job in poison), what=what, who="worker"
    )
    stage.note(
        each_reason_says_so=all("cannot be rendered" in job.error for job in poison),
        dispatcher_lives_on=stage.fleet.pid("dispatcher") == before,
    )


def out_of_order(stage: Stage) -> None:
    stage.start()
    database = stage.means.database
    lower, higher = sorted((new_id(), new_id()))
    with database.transaction() as late:
        _insert(stage, late, lower)
        with database.transaction() as early:
            _insert(stage, early, higher)
        stage.await_state(State.SUCCEEDED)
        stage.let_pass()
        stage.note(higher_was_run_first=[job.id for job in stage.jobs()] == [higher])
        stage.strike()
        late.commit()
    stage.await_end()
    stage.note(publishes=[job.publishes for job in stage.jobs()])


def broker_down(stage: Stage) -> None:
    _start(stage)
    before = _processes(stage)
    with _down(stage):
        stage.place()
        stage.await_answer()
        _await_refusal(stage)
        _note_by_then(stage)
    stage.await_end()
    stage.note(
        publishes=stage.job().publishes,
        nobody_was_restarted=_processes(stage) == before,
    )


def broker_hangs(stage: Stage) -> None:
    """With connections that are open: what was sent into the silence arrives after it."""
    _start(stage)
    stage.place()
    with stage.means.database.transaction() as session:
        _insert(stage, session, new_id())
    stage.await_end()
    before = _processes(stage)
    broker = stage.means.broker
    stage.strike()
    with broker.hung():
        stage.place()
        stage.await_answer()
        stage.note(answered_while_it_hung=broker.is_stopped)
        _await_row_held_and_free(stage, stage.jobs()[-1].id)
        _await_refusal(stage)
        _note_by_then(stage)
        stage.note(row_free_while_it_hung=broker.is_stopped)
    stage.await_end()
    stage.await_drained()
    facts = stage.facts()
    stage.note(
        deliveries_that_ran=facts.deliveries - facts.discarded,
        some_came_again=facts.discarded > 0,
        nobody_was_restarted=_processes(stage) == before,
    )


def _start(stage: Stage) -> None:
    stage.start({"worker": stage.with_settings(OUTBOX=NO_TICKER)})


@contextmanager
def _down(stage: Stage) -> Iterator[None]:
    """Stop Valkey, and start it again at the end."""
    stage.means.say("stopping Valkey")
    stage.strike()
    stage.means.broker.stop()
    try:
        yield
    finally:
        stage.means.say("starting Valkey")
        stage.means.broker.start()


def _insert(
    stage: Stage, session: psycopg.Connection, job_id: UUID, args: str = "[]", options: str = "{}"
) -> None:
    """By plain SQL, so that nobody but a tick publishes it."""
    stage.expected += 1
    session.execute(_INSERT, [job_id, tasks.touch.name, args, options])


def _await_refusal(stage: Stage) -> None:
    """Wait until a pass of the dispatcher has met the broker's silence."""

    def refused() -> bool:
        last = record.latest_pass(DISPATCH)
        return bool(last and last.found.get("broker"))

    stage.until(refused, what="the dispatcher to be refused by the broker", who="dispatcher")


def _await_row_held_and_free(stage: Stage, job_id: UUID) -> None:
    """Wait until the dispatcher holds the row, and then until its transaction is over."""
    database = stage.means.database
    held, free = "the dispatcher to hold the row", "the dispatcher to let the row go"
    stage.until(lambda: not database.row_is_free(job_id), what=held, who="dispatcher")
    stage.until(lambda: database.row_is_free(job_id), what=free, who="dispatcher")


def _note_by_then(stage: Stage) -> None:
    job = stage.jobs()[-1]
    stage.note(state_by_then=job.state, attempts_by_then=job.attempts)


def _processes(stage: Stage) -> Sequence[Any]:
    fleet = stage.fleet
    names: tuple[Name, ...] = ("web", "dispatcher", "worker")
    return [[fleet.pid(name) for name in names], fleet.children("worker")]


_BY_THEN = {"state_by_then": State.PENDING, "attempts_by_then": 0}

POINTS = (
    Point(
        name="poison-row-at-the-head",
        summary="no process dies; the oldest rows, by plain SQL, cannot be made into messages",
        expected=(
            "each of these fails alone, for a reason that says so, and its owner is told; the jobs "
            "behind them have one attempt and one effect each"
        ),
        play=poison_row,
        wants=lambda given: own(
            jobs=len(UNREADABLE) + BEHIND,
            state=[State.FAILED] * len(UNREADABLE) + [State.SUCCEEDED] * BEHIND,
            attempts=[0] * len(UNREADABLE) + [1] * BEHIND,
            effects=BEHIND,
            keys=BEHIND,
            deliveries=BEHIND,
            error_kept=True,
            each_reason_says_so=True,
            dispatcher_lives_on=True,
            reject_events=len(UNREADABLE),
            owner_mails=len(UNREADABLE),
        ),
        risk="what such a row owed is not done until somebody writes it anew",
    ),
    Point(
        name="out-of-order-commit",
        summary="commit a job only after one with a higher ID, which began later, has been run",
        expected="the dispatcher passes over neither; published once, one attempt, one effect each",
        play=out_of_order,
        wants=lambda given: own(
            jobs=2,
            effects=2,
            keys=2,
            deliveries=2,
            higher_was_run_first=True,
            publishes=[1, 1],
        ),
        risk="none known; entries run in no promised order",
    ),
    Point(
        name="broker-down-while-enqueuing",
        summary="stop Valkey, place the {business}, and start Valkey again",
        expected=(
            "the web answers as always; the job is pending and no attempt is burnt; it is "
            "published when Valkey is back; one attempt, one {effect}"
        ),
        play=broker_down,
        wants=lambda given: once(
            **_BY_THEN,
            killed=[],
            publishes=1,
            deliveries=1,
            discarded=0,
            nobody_was_restarted=True,
        ),
        risk="none known; the {effect} comes when the broker is back",
    ),
    Point(
        name="broker-hangs",
        summary="SIGSTOP Valkey, which then never answers, place one {business}, SIGCONT it",
        expected=(
            "the web answers, and the dispatcher lets the row go, while Valkey still hangs; then "
            "one attempt, one {effect}; a message that comes again is discarded"
        ),
        play=broker_hangs,
        wants=lambda given: once(
            **_BY_THEN,
            killed=[],
            business=2,
            jobs=3,
            effects=3,
            keys=3,
            answered_while_it_hung=True,
            row_free_while_it_hung=True,
            deliveries_that_ran=3,
            some_came_again=True,
            nobody_was_restarted=True,
        ),
        risk="none known; whoever places the {business} waits for one publish timeout",
    ),
)

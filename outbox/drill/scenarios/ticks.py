"""The maintenance ticks: two beats, no beat, a reconcile that dies, a queue that nobody takes."""

from __future__ import annotations

import re
from datetime import timedelta
from itertools import pairwise

from outbox import maintenance
from outbox.conf import default_database
from outbox.drill import tasks, ticking
from outbox.drill.environment import QUEUES, TIMES
from outbox.drill.facts import KILLED
from outbox.drill.scenarios.point import Given, Point, Wants, once, own
from outbox.drill.scenarios.publishing import no_broker
from outbox.drill.stage import Stage
from outbox.failpoints import Failpoint
from outbox.states import State
from outbox.ticks import DISPATCH, RECONCILE
from outbox.worker.ticker import LATE

# Of the worker in `two_beats`, whose own ticker must not be first: it waits for three rounds. Its
# tick's lease is two rounds long, which must do while a run stands still. Lease and grace follow.
SLOW = {"LEASE": 6, "DISPATCH_EVERY": 2, "RECONCILE_EVERY": 4, "STRAND_GRACE": 4}
APART = "drill-apart"  # a queue that no worker consumes
OLD = 2.0  # seconds: over age
UNCONSUMED = "queue_without_consumer"

_TICKS = re.compile(r"Task outbox\.(?:dispatch|reconcile|prune)\[").findall
_RECONCILED = re.compile(r"Task outbox\.reconcile\[\S+\] succeeded").findall


def two_beats(stage: Stage) -> None:
    with no_broker() as web:
        _run_ticks_once(stage)
        _lose_a_message(stage)
        worker = {**stage.stop_at(Failpoint.FOUND), **stage.with_settings(OUTBOX=SLOW)}
        stage.start_without_dispatcher(
            {"web": web, "worker": worker, "beat": {}, "second beat": {}}
        )
        stage.await_stop("worker", at=Failpoint.FOUND)
        stage.note(ticks_while_one_stood=_await_ticks(stage, more=2))
        stage.let_go(Failpoint.FOUND)
        stage.place()
        stage.await_end()
    _note_ticks(stage)


def _run_ticks_once(stage: Stage) -> None:
    """So that none is late when the worker starts."""
    stage.start_only({"dispatcher": {}})
    stage.let_look()


def _lose_a_message(stage: Stage) -> None:
    """A job that is published, and whose message nobody has."""
    stage.fleet.stop("worker", "dispatcher")
    stage.owe(tasks.touch)
    stage.await_state(State.PUBLISHED)
    stage.means.say("emptying the broker")
    stage.means.broker.wipe()
    stage.strike()


def _await_ticks(stage: Stage, *, more: int) -> bool:
    """Wait until a child of the worker has done with so many more of beat's reconcile ticks."""

    def done() -> int:
        return len(_RECONCILED(stage.fleet.tail("worker", lines=100_000)))

    first = done()
    stage.until(lambda: done() >= first + more, what="other ticks to come and go", who="worker")
    return True


def _note_ticks(stage: Stage) -> None:
    """Who did what. The worker's main process has a ticker of its own: see that it was not that."""
    reconciles = ticking.steps(RECONCILE, since=stage.begun)
    dispatches = ticking.steps(DISPATCH, since=stage.begun)
    found = [step for step in reconciles if step.did("stranded")]
    found += [step for step in dispatches if step.did("published")]
    # A child has inherited what its parent had open when it was forked.
    main = ticking.ports({stage.fleet.pid("worker")})
    children = ticking.ports(stage.fleet.children("worker")) - main
    stage.note(
        reconciles_that_overlapped=sum(step.overlaps for step in reconciles),
        done_by_beats_ticks=bool(found) and all(step.port in children for step in found),
    )


def beat_dead(stage: Stage) -> None:
    with no_broker() as web:
        stage.start_without_dispatcher({"web": web, "beat": {}})
        stage.let_pass()
        stage.kill("beat")
        _lose_a_message(stage)
        last = stage.means.database.now()
        stage.start_only({"worker": {}})
        stage.place()
        stage.await_end()
    # Not of dispatch: what reconcile finds to be owed again it publishes at once.
    ran = [step for step in ticking.steps(RECONCILE, since=last) if step.ran]
    apart = [(later.at - step.at).total_seconds() for step, later in pairwise(ran)]
    left = [each >= LATE * TIMES["RECONCILE_EVERY"] for each in apart]
    stage.note(
        ticks_from_beat=len(_TICKS(stage.fleet.tail("worker", lines=100_000))),
        left_three_ticks_to_others=bool(left) and all(left),
    )


def reconcile_killed_midway(stage: Stage) -> None:
    stage.start_without_worker({"dispatcher": stage.stop_at(Failpoint.FOUND, armed=False)})
    stage.place()
    stage.place()
    stage.await_state(State.PUBLISHED, jobs=2)
    stage.means.broker.wipe()
    stage.await_missing()
    stage.fleet.arm(Failpoint.FOUND)
    stage.await_stop("dispatcher", at=Failpoint.FOUND)
    stage.kill("dispatcher")
    died, lease = stage.means.database.now(), ticking.lease_until(RECONCILE)
    maintenance.reconcile(stage.means.broker.app, using=default_database(), anew=True)
    stage.start_without_dispatcher({"second dispatcher": {}})
    stage.await_end()
    most = timedelta(seconds=2 * TIMES["RECONCILE_EVERY"])
    steps = ticking.steps(RECONCILE, since=stage.begun)
    stage.note(
        kept_others_out_for_two_rounds_at_most=bool(lease and lease - died <= most),
        taken_over_before_that_was_over=sum(step.overlaps for step in steps),
    )


def nobody_consumes_the_queue(stage: Stage) -> None:
    stage.start({"dispatcher": stage.with_settings(OUTBOX={"OVER_AGE": OLD})})
    stage.owe(tasks.touch, queue=APART)
    stage.await_state(State.PUBLISHED)
    stage.until(lambda: UNCONSUMED in _complaints(stage), what=UNCONSUMED, who="worker")
    stage.await_owner_told()
    stage.let_look()
    waits = stage.job()
    stage.note(
        state_by_then=waits.state,
        messages_by_then=stage.means.broker.holds(APART)[0],
        publishes_by_then=waits.publishes,
    )
    stage.strike()
    stage.start_only({"second worker": {QUEUES: APART}})
    stage.await_end()
    stage.let_look()
    stage.note(publishes=stage.job().publishes, complains_still=UNCONSUMED in _complaints(stage))


def _complaints(stage: Stage) -> set[str]:
    """The codes of what is wrong, where the command's exit status says so too."""
    seen = stage.status({})
    return {problem["code"] for problem in seen["problems"] if seen["exit status"] == 1}


def _of_two(given: Given) -> Wants:
    """One job of the subject that nobody had published, and one whose message was lost."""
    return once(killed=[], jobs=2, effects=2, keys=2, strand_events=1)


POINTS = (
    Point(
        name="two-beats",
        summary="no process dies; two celery-beats, no dispatcher, and a web without a broker",
        expected=(
            "beat's ticks dispatch what the web could not publish, and find the message that was "
            "lost; while one reconcile stands still the others leave it alone, so that no two "
            "overlap; one attempt and one effect each"
        ),
        play=two_beats,
        wants=lambda given: {
            **_of_two(given),
            "deliveries": 2,
            "ticks while one stood": True,
            "reconciles that overlapped": 0,
            "done by beats ticks": True,
        },
        risk="none known; a second beat costs the worker its ticks, and nothing else",
    ),
    Point(
        name="beat-dead",
        summary="SIGKILL the only celery-beat, where no dispatcher runs and web has no broker",
        expected=(
            "the worker dispatches and reconciles by itself, when nobody has for three ticks: what "
            "the web could not publish is run, the message that was lost is found; one attempt and "
            "one effect each"
        ),
        play=beat_dead,
        wants=lambda given: {
            **_of_two(given),
            "killed": KILLED,
            "deliveries": 2,
            "ticks from beat": 0,
            "left three ticks to others": True,
        },
        risk="none known while a worker runs; it comes later by three ticks",
    ),
    Point(
        name="reconcile-killed-midway",
        summary="SIGKILL who reconciles, after it found two messages lost, before it repairs",
        expected=(
            "nobody takes its tick before its lease is over, which is two rounds at most; then "
            "another dispatcher finds the same and repairs each once; one attempt and one {effect} "
            "each"
        ),
        play=reconcile_killed_midway,
        wants=lambda given: once(
            business=2,
            jobs=2,
            effects=2,
            keys=2,
            deliveries=2,
            strand_events=2,
            kept_others_out_for_two_rounds_at_most=True,
            taken_over_before_that_was_over=0,
        ),
        risk="none known; what was lost comes later by up to two rounds of reconcile",
    ),
    Point(
        name="nobody-consumes-the-queue",
        summary="no process dies; a job waits in a queue without a worker, which then starts",
        expected=(
            "outbox_status is unhealthy and names the queue, the owner is told once, nothing is "
            "published again; when a worker consumes it: one publish, one attempt, one effect"
        ),
        play=nobody_consumes_the_queue,
        wants=lambda given: own(
            deliveries=1,
            owner_mails=1,
            strand_events=0,
            state_by_then=State.PUBLISHED,
            messages_by_then=1,
            publishes_by_then=1,
            publishes=1,
            complains_still=False,
        ),
        risk="none known; what nobody consumes waits until a person has read the mail",
    ),
)

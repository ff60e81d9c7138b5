"""A person cancels a job; whatever happens to its run afterwards, it stays cancelled."""

from __future__ import annotations

from outbox.drill import tasks
from outbox.drill.facts import KILLED
from outbox.drill.scenarios.point import Point, cancelled, once
from outbox.drill.stage import Stage
from outbox.drill.subject import Mode
from outbox.failpoints import Failpoint
from outbox.states import State


def cancel_then_fail(stage: Stage) -> None:
    _cancel_hanging(stage, then="refuse")


def cancel_then_succeed(stage: Stage) -> None:
    _cancel_hanging(stage, then="ok")


def _cancel_hanging(stage: Stage, *, then: Mode) -> None:
    with stage.hanging_destination() as behave:
        stage.start()
        stage.place()
        stage.await_hanging()
        stage.cancel()
        behave(then)
        stage.await_settled()


def cancel_then_timeout(stage: Stage) -> None:
    stage.start()
    stage.owe(tasks.overrun)
    stage.await_state(State.RUNNING)
    child = stage.job().lease_pid
    stage.cancel()
    stage.await_settled()
    stage.note(child_was_killed=child not in stage.fleet.children("worker"))


def cancel_then_crash(stage: Stage) -> None:
    stage.start({"worker": stage.stop_at(Failpoint.CLAIMED)})
    stage.place()
    pid = stage.await_stop("worker", at=Failpoint.CLAIMED)
    stage.cancel()
    stage.kill_child(pid)
    stage.await_settled()


def cancel_then_stranded(stage: Stage) -> None:
    stage.start_without_worker()
    stage.place()
    stage.await_state(State.PUBLISHED)
    published = stage.means.database.now()
    stage.cancel()
    stage.means.broker.wipe()
    stage.let_reconcile(after=published)
    stage.note(messages_afterwards=sum(stage.means.broker.holds(stage.job().queue)))
    stage.start()
    stage.let_pass()


def cancel_before_claim(stage: Stage) -> None:
    stage.start_without_worker()
    stage.place()
    stage.await_state(State.PUBLISHED)
    stage.cancel()
    stage.start()
    stage.await_discard()
    stage.let_pass()


def cancel_terminate_requeue(stage: Stage) -> None:
    with stage.hanging_destination() as behave:
        stage.start()
        stage.place()
        stage.await_hanging()
        main, children = stage.fleet.pid("worker"), stage.fleet.children("worker")
        child = stage.job().lease_pid
        stage.fleet.freeze("worker", alone=True)  # else the kill may be quicker than the next line
        stage.cancel(terminate=True)
        stage.note(requeued_too_early=stage.requeue())
        stage.strike()
        stage.fleet.thaw("worker", alone=True)
        stage.await_settled()
        left = stage.fleet.children("worker") & children
        stage.note(
            only_its_child_died=left == children - {child},
            main_process_lives=stage.fleet.pid("worker") == main,
            state_by_then=stage.job().state,
        )
        stage.await_cut()
        behave("ok")
        stage.note(requeued_afterwards=stage.requeue())
        stage.await_end()


POINTS = (
    Point(
        name="cancel-then-fail",
        summary="cancel a running job, whose attempt then fails",
        expected="it stays cancelled and is not tried again; no {effect}",
        play=cancel_then_fail,
        wants=lambda given: cancelled(late_events=1, settled_by=["worker"]),
        risk="none known",
    ),
    Point(
        name="cancel-then-succeed",
        summary="cancel a running job, whose attempt then succeeds",
        expected=(
            "it stays cancelled and its result is discarded; the {effect} of the run that went on "
            "has happened, once"
        ),
        play=cancel_then_succeed,
        wants=lambda given: cancelled(
            late_events=1,
            settled_by=["worker"],
            effects=int(given.kind != "atomic"),
            keys=int(given.kind != "atomic"),
        ),
        risk="a cancellation does not interrupt running code: what it was about to do may happen",
    ),
    Point(
        name="cancel-then-timeout",
        summary="cancel a running job, which then meets its hard time limit",
        expected="its child is killed, it stays cancelled, and no failure is counted",
        play=cancel_then_timeout,
        wants=lambda given: cancelled(business=0, settled_by=["clerk"], child_was_killed=True),
        risk="none known",
    ),
    Point(
        name="cancel-then-crash",
        summary="cancel a running job, and SIGKILL the child that runs it",
        expected="it stays cancelled, and no crash is counted; no {effect}",
        play=cancel_then_crash,
        wants=lambda given: cancelled(killed=KILLED, settled_by=["clerk"]),
        risk="none known",
    ),
    Point(
        name="cancel-then-stranded",
        summary="cancel a published job, wipe the broker and let reconcile see what is missing",
        expected="it is not published again: no message, no attempt, no {effect}",
        play=cancel_then_stranded,
        wants=lambda given: cancelled(
            attempts=0, deliveries=0, messages_afterwards=0, strand_events=0
        ),
        risk="none known",
    ),
    Point(
        name="cancel-before-claim",
        summary="cancel a job whose message waits in the queue, then start a worker",
        expected="the delivery is discarded; no attempt, no {effect}",
        play=cancel_before_claim,
        wants=lambda given: cancelled(attempts=0, deliveries=1, discarded=1),
        risk="none known",
    ),
    Point(
        name="cancel-terminate-requeue",
        summary="cancel a running job with terminate, and retry it when its run is gone",
        expected=(
            "just the child that ran it is killed; a retry is refused until the run is over and "
            "accepted then; two attempts, no crash, one {effect}"
        ),
        play=cancel_terminate_requeue,
        wants=lambda given: once(
            killed=[],
            attempts=2,
            requeued_too_early=False,
            requeued_afterwards=True,
            state_by_then=State.CANCELLED,
            settled_by=["clerk"],
            only_its_child_died=True,
            main_process_lives=True,
        ),
        risk=(
            "a destination that accepts what a dead client sent would see the {effect} twice; "
            "here it noticed that the connection was cut"
        ),
    ),
)

"""Two who mean the same row: whoever comes second is refused, in each order that can be forced."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from uuid import UUID

from outbox.drill import people, tasks
from outbox.drill.people import Request
from outbox.drill.scenarios.point import Given, Point, Wants, once
from outbox.drill.stage import Stage
from outbox.failpoints import Failpoint
from outbox.states import State


def reconciler_races_completion(stage: Stage) -> None:
    """The message is on its way, in nobody's list, when reconcile looks twice."""
    stage.start_without_worker({"dispatcher": stage.stop_at(Failpoint.FOUND, armed=False)})
    stage.place()
    stage.await_state(State.PUBLISHED)
    put_back = stage.means.broker.take(stage.job().queue)
    stage.await_missing()
    stage.fleet.arm(Failpoint.FOUND)
    stage.await_stop("dispatcher", at=Failpoint.FOUND)
    put_back()
    stage.start_only({"worker": {}})
    stage.await_state(State.SUCCEEDED)
    ended = stage.job()
    stage.let_go(Failpoint.FOUND)
    stage.let_look()
    stage.await_end()
    after = stage.job()
    stage.note(changed_by_reconcile=after.written != ended.written, publishes=after.publishes)


def late_mark_after_retry(stage: Stage) -> None:
    """The queue is paused, so that the retry is still pending when the mark comes."""
    stage.fleet.stop("worker", "dispatcher")
    stage.subject.destination("refuse")
    try:
        stage.start_only({"web": stage.stop_at(Failpoint.FLUSHED)})
        stage.place()
        stage.await_stop("web", at=Failpoint.FLUSHED)
        with stage.paused(stage.job().queue):
            stage.start_only({"worker": {}})
            stage.await_event("retry")
            failed = stage.job()
            stage.let_go(Failpoint.FLUSHED)
            stage.await_placed()
            late = stage.job()
    finally:
        stage.subject.destination("ok")
    stage.note(state_after_the_mark=late.state, changed_by_it=late.written != failed.written)
    stage.strike()
    stage.start_only({"dispatcher": {}})
    stage.await_end()


def operator_retry_races_rescue(stage: Stage) -> None:
    lingering = stage.fleet.folder / tasks.LINGERING
    lingering.touch()
    with stage.hanging_destination() as behave:
        stage.start({"second dispatcher": {}})
        stage.place()
        stage.await_hanging()
        stage.owe(tasks.linger_once)
        stage.await_state(State.RUNNING, jobs=2)
        stage.cancel()
        ids = [job.id for job in stage.jobs()]
        with ExitStack() as held:
            _hold(stage, held, ids)
            stage.kill("worker")
            first = _ask(stage, ids)
            waited = [not request.answer.done() for request in first]
            _await_lapse(stage)
            stage.let_pass()  # the rescuers skip what somebody holds
            _freeze(stage)  # else one of them may be quicker than who waits for the row
            held.close()
            before = [request.answer.result(stage.means.timeout) for request in first]
            _thaw(stage)
        stage.until(lambda: _are_rescued(stage), what="both to be rescued", who="dispatcher")
        with ExitStack() as held:
            _hold(stage, held, ids)
            both = _ask(stage, ids * 2)
            waited += [not request.answer.done() for request in both]
        after = [request.answer.result(stage.means.timeout) for request in both]
        behave("ok")
        lingering.unlink()
        stage.start()
        stage.await_end()
    jobs = stage.jobs()
    stage.note(
        people_who_waited_for_a_row=sum(waited),
        requeued_before_the_rescue=sum(before),
        requeued_by_two_at_once=[sum(after[0::2]), sum(after[1::2])],
        crashes_still_allowed=[(job.crash_limit or 0) - job.crashes for job in jobs],
    )


def _hold(stage: Stage, held: ExitStack, ids: Sequence[UUID]) -> None:
    for job_id in ids:
        held.enter_context(stage.means.database.row_locked(job_id))


def _ask(stage: Stage, ids: Sequence[UUID]) -> list[Request]:
    """People who retry these: each waits for the row that somebody holds, or is refused at once."""
    asked = [people.ask_to_requeue(job_id) for job_id in ids]
    stage.until(
        lambda: all(_stands(stage, request) for request in asked),
        what="all to wait for their row",
        who="dispatcher",
    )
    return asked


def _stands(stage: Stage, request: Request) -> bool:
    if request.answer.done():
        return True
    session = request.session.result(stage.means.timeout)
    return stage.means.database.is_held_up(session)


def _await_lapse(stage: Stage) -> None:
    def over() -> bool:
        now = stage.means.database.now()
        return all(job.lease_until and job.lease_until < now for job in stage.jobs())

    stage.until(over, what="both leases to be over", who="dispatcher")


def _are_rescued(stage: Stage) -> bool:
    return all(job.lease_until is None and job.has_ended for job in stage.jobs())


def _freeze(stage: Stage) -> None:
    stage.fleet.freeze("dispatcher")
    stage.fleet.freeze("second dispatcher")


def _thaw(stage: Stage) -> None:
    stage.fleet.thaw("dispatcher")
    stage.fleet.thaw("second dispatcher")


def _one_new_life(given: Given) -> Wants:
    return once(
        jobs=2,
        attempts=2,
        crashes=[0, 1],
        effects=2,
        keys=2,
        deliveries=4,
        settle_events=1,
        crash_events=1,
        requeue_events=2,
        owner_mails=1,
        people_who_waited_for_a_row=1 + 4,  # a running job is refused without a look at its lock
        requeued_before_the_rescue=0,
        requeued_by_two_at_once=[1, 1],
        crashes_still_allowed=[given.crashes, 1],
    )


POINTS = (
    Point(
        name="reconciler-races-completion",
        summary="no process dies; a message that reconcile has missed twice arrives, and is run",
        expected=(
            "when it comes to repair it the job has ended: its repair is refused and changes "
            "nothing; one publish, one attempt, no crash, one {effect}"
        ),
        play=reconciler_races_completion,
        wants=lambda given: once(
            killed=[],
            deliveries=1,
            discarded=0,
            strand_events=0,
            changed_by_reconcile=False,
            publishes=1,
        ),
        risk="none known",
    ),
    Point(
        name="late-mark-after-retry",
        summary="no process dies; the web marks a job as published after its first run has failed",
        expected=(
            "the mark is refused by the version: the retry stays pending, is dispatched and run; "
            "two attempts, one failure, one {effect}"
        ),
        play=late_mark_after_retry,
        wants=lambda given: once(
            killed=[],
            attempts=2,
            failures=1,
            deliveries=2,
            strand_events=0,
            state_after_the_mark=State.PENDING,
            changed_by_it=False,
        ),
        risk="none known",
    ),
    Point(
        name="operator-retry-races-rescue",
        summary=(
            "SIGKILL the worker with a cancelled run and one at its crash cap, and retry both "
            "while two dispatchers rescue them"
        ),
        expected=(
            "a retry before the rescue is refused, of two at once after it one is accepted: each "
            "job has one new life with a new budget; two attempts, one effect each"
        ),
        play=operator_retry_races_rescue,
        wants=_one_new_life,
        risk=(
            "a destination that accepts what a dead client sent would see the {effect} twice; "
            "here it noticed that the connection was cut"
        ),
    ),
)

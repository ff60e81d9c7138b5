"""A job that will not work: it ends, with its reason, and takes nothing down with it."""

from __future__ import annotations

from outbox.drill import tasks
from outbox.drill.scenarios.point import Given, Point, Wants, once, own
from outbox.drill.stage import Stage
from outbox.states import State

FAILURES = 1_000
LEFT_TO_START = 1  # second; then these fail
GATHERED_FOR = {"TELL_EVERY": 60}  # seconds
UNTOLD = "nobody-yet"  # an owner who was told nothing by earlier points; the default one reads it


def after_retry_limit(stage: Stage) -> None:
    stage.start()
    stage.subject.destination("refuse")
    try:
        stage.place()
        stage.await_end()
        stage.await_owner_told()
    finally:
        stage.subject.destination("ok")


def exit_and_memory_error(stage: Stage) -> None:
    stage.start()
    before = stage.fleet.pid("worker"), stage.fleet.children("worker")
    stage.owe(tasks.leave, "exit")
    stage.owe(tasks.leave, "memory")
    stage.await_end()
    left, ran_out, *_ = stage.jobs()
    stage.place()
    stage.await_end()
    after = stage.fleet.pid("worker"), stage.fleet.children("worker")
    stage.note(
        worker_and_children_live_on=before == after,
        errors_name_them="SystemExit" in left.error and "MemoryError" in ran_out.error,
    )


def deadline_passed(stage: Stage) -> None:
    stage.start()
    stage.owe(tasks.keep_failing)
    stage.await_end()
    stage.await_owner_told()
    job = stage.job()
    attempts = [*job.seen("retry"), *job.seen("fail")]
    starts = [event.started_at for event in attempts if event.started_at]
    said = [job.error, *(event.words for event in job.events[-1:])]
    stage.note(
        started_after_the_deadline=sum(at > job.deadline_at for at in starts if job.deadline_at),
        each_traceback_kept=[bool(event.traceback) for event in attempts] == [True] * job.attempts,
        tried_again=job.attempts > 1,
        reason_names_the_deadline=any("deadline" in words for words in said),
    )


def owner_is_told_once(stage: Stage) -> None:
    gathering = stage.with_settings(OUTBOX=GATHERED_FOR)
    stage.start_without_worker({"dispatcher": gathering})
    stage.owe_many(tasks.touch, FAILURES, expires=LEFT_TO_START, owner=UNTOLD)
    stage.await_count(FAILURES, State.FAILED)
    stage.start({"dispatcher": gathering, "worker": gathering})
    stage.await_owner_told()
    stage.let_pass()
    stage.note(**stage.messages())


def _told_once(given: Given) -> Wants:
    return {
        "killed": [],
        "jobs": FAILURES,
        "state": State.FAILED,
        "attempts": 0,
        "effects": 0,
        "failures told": FAILURES,
        "messages": 1,
        "mails": 1,
    }


def _given_up(given: Given) -> Wants:
    return once(
        killed=[],
        state=State.FAILED,
        attempts=given.attempts,
        failures=given.attempts,
        tracebacks=given.attempts,
        error_kept=True,
        effects=0,
        keys=0,
        signals=1,
        owner_mails=1,
    )


def _left(given: Given) -> Wants:
    return own(
        business=1,
        jobs=3,
        state=[State.FAILED, State.FAILED, State.SUCCEEDED],
        failures=[1, 1, 0],
        error_kept=True,
        errors_name_them=True,
        worker_and_children_live_on=True,
    )


def _past_deadline(given: Given) -> Wants:
    return {
        "killed": [],
        "jobs": 1,
        "state": State.FAILED,
        "crashes": 0,
        "effects": 0,
        "error kept": True,
        "tried again": True,
        "started after the deadline": 0,
        "each traceback kept": True,
        "reason names the deadline": True,
        "owner mails": 1,
    }


POINTS = (
    Point(
        name="after-retry-limit",
        summary="no process dies while the destination refuses every attempt",
        expected=(
            "failed after {attempts} attempts; the error and each attempt's traceback are kept; "
            "the owner is told by signal and by one mail"
        ),
        play=after_retry_limit,
        wants=_given_up,
        risk="the {effect} is not sent until its owner retries the job",
    ),
    Point(
        name="deadline-passed",
        summary="no process dies while a task with a retry deadline keeps failing",
        expected=(
            "failed by its deadline, for a reason that says so; no attempt starts after it, and "
            "each attempt's traceback is kept"
        ),
        play=deadline_passed,
        wants=_past_deadline,
        risk="what the job owed is not done until its owner retries it",
    ),
    Point(
        name="exit-and-memory-error-in-a-task",
        summary="no process is killed; one task raises SystemExit, another MemoryError",
        expected=(
            "both are recorded as failed, with their error; worker and children live on, and the "
            "next job succeeds"
        ),
        play=exit_and_memory_error,
        wants=_left,
        risk="none known; a MemoryError that the system answers with a SIGKILL is child-killed",
    ),
    Point(
        name="owner-is-told-once",
        summary=f"nobody dies; {FAILURES:,} jobs of one owner fail in one moment",
        expected="one message to the owner that counts them all",
        play=owner_is_told_once,
        wants=_told_once,
        risk="a later failure is told in the next message, after a pause",
    ),
)

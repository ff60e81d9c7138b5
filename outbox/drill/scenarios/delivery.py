"""What the broker delivers: again, after a cancellation, or to a worker that does not know it."""

from __future__ import annotations

from outbox.drill.environment import UNKNOWN
from outbox.drill.scenarios.point import Point, once
from outbox.drill.stage import Stage
from outbox.states import State


def redelivery_while_running(stage: Stage) -> None:
    with stage.hanging_destination() as behave:
        stage.start()
        stage.place()
        stage.await_hanging()
        job, broker = stage.job(), stage.means.broker
        broker.restore(job.id)
        stage.await_discard()
        stage.until(
            lambda: broker.holds(job.queue) == (0, 0), what="it to be acknowledged", who="worker"
        )
        again = stage.job()
        stage.note(runs_by_then=again.attempts, state_by_then=again.state)
        stage.kill("worker")
        stage.start()
        stage.await_event("crash")
        behave("ok")
        stage.await_end()


def old_worker_new_task(stage: Stage) -> None:
    stage.start({"worker": {UNKNOWN: stage.subject.task}})
    stage.place()
    stage.await_event("decline")
    stage.note(burnt_by_then=stage.job().attempts)
    stage.start()
    stage.await_end()


POINTS = (
    Point(
        name="redelivery-while-running",
        summary="redeliver a running job's message as after a visibility timeout, then SIGKILL",
        expected=(
            "the second delivery is discarded and acknowledged, so that the broker holds nothing; "
            "when the worker dies the lease brings the job back; two attempts, one {effect}"
        ),
        play=redelivery_while_running,
        wants=lambda given: once(
            attempts=2,
            crashes=1,
            deliveries=3,
            discarded=1,
            runs_by_then=1,
            state_by_then=State.RUNNING,
        ),
        risk="none known; a job may be longer than the broker's visibility timeout",
    ),
    Point(
        name="old-worker-new-task",
        summary="no process dies; a worker of an older release, without the task's code, gets it",
        expected=(
            "it gives the job back, and nothing is burnt or stored; a worker that knows the task "
            "runs it; one attempt, one {effect}"
        ),
        play=old_worker_new_task,
        wants=lambda given: once(killed=[], burnt_by_then=0),
        risk="none known; while only such workers run, the job goes round and waits",
    ),
)

"""A worker is asked to end, as every deploy does."""

from __future__ import annotations

from signal import SIGQUIT, SIGTERM

from outbox.drill import tasks
from outbox.drill.scenarios.point import Point, once
from outbox.drill.stage import Stage
from outbox.failpoints import Failpoint
from outbox.states import State

JOBS = 4  # more than the worker has children, and no more than it prefetches


def rolling_deploy(stage: Stage) -> None:
    with stage.hanging_destination() as behave:
        stage.start()
        for _ in range(JOBS):
            stage.place()
        stage.await_hanging(runs=2)
        stage.await_taken(JOBS)
        stage.start_only({"second worker": {}})
        await_exit = stage.ask_to_end("worker", SIGTERM)
        behave("ok")
        await_exit()
        stage.await_end()


def shutdown_grace_over(stage: Stage) -> None:
    lingering = stage.fleet.folder / tasks.LINGERING
    lingering.touch()
    stage.start({"worker": stage.stop_at(Failpoint.CLAIMED)})
    stage.place()
    stage.await_stop("worker", at=Failpoint.CLAIMED)
    stage.owe(tasks.linger)
    stage.await_state(State.RUNNING, jobs=2)
    await_exit = stage.ask_to_end("worker", SIGTERM, then=(SIGQUIT, "Warm shutdown"))
    await_exit()
    stage.note(leases_when_it_was_gone=sum(job.lease_until is not None for job in stage.jobs()))
    lingering.unlink()
    stage.start()
    stage.await_end()


POINTS = (
    Point(
        name="rolling-deploy",
        summary="start a second worker, and SIGTERM the first, which runs two jobs and holds two",
        expected=(
            "what runs is finished, what was only held is given back to the broker and run by the "
            "second worker; four jobs with one attempt and one {effect} each"
        ),
        play=rolling_deploy,
        wants=lambda given: once(killed=[0], business=JOBS, jobs=JOBS, effects=JOBS, keys=JOBS),
        risk="none known, where the old worker is given the time that its jobs take",
    ),
    Point(
        name="shutdown-grace-over",
        summary="SIGTERM the worker, then SIGQUIT, while one run is before and one in its body",
        expected=(
            "both are given back and burn nothing; the next worker runs them: two attempts, one "
            "release and one effect each"
        ),
        play=shutdown_grace_over,
        wants=lambda given: once(
            killed=[0],
            jobs=2,
            attempts=2,
            releases=1,
            effects=2,
            keys=2,
            leases_when_it_was_gone=0,
        ),
        risk=(
            "a run that is called off while the destination has its {effect} and has not answered "
            "may send it twice, as at after-effect"
        ),
    ),
)

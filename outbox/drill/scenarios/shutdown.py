"""A worker is asked to end, as every deploy does."""

from __future__ import annotations

from signal import SIGQUIT, SIGTERM

from outbox.drill.scenarios.point import Point, once
from outbox.drill.stage import Stage

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
    with stage.hanging_destination() as behave:
        stage.start()
        stage.place()
        stage.await_hanging()
        await_exit = stage.ask_to_end("worker", SIGTERM, then=(SIGQUIT, "Warm shutdown"))
        await_exit()
        stage.await_cut()
        stage.note(given_back_when_it_was_gone=not stage.job().lease_until)
        behave("ok")
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
        summary="SIGTERM the worker, and SIGQUIT it while the destination keeps its run waiting",
        expected=(
            "the run is given back and burns nothing; the next worker runs it: two attempts, one "
            "release, one {effect}"
        ),
        play=shutdown_grace_over,
        wants=lambda given: once(
            killed=[0], attempts=2, releases=1, given_back_when_it_was_gone=True
        ),
        risk=(
            "a destination that accepts what a cut connection sent would see the {effect} twice; "
            "here it noticed"
        ),
    ),
)

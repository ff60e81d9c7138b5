"""From a committing transaction to the broker: whoever publishes is killed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from outbox.drill import tasks
from outbox.drill.environment import broker_variables
from outbox.drill.facts import KILLED
from outbox.drill.fleet import Env
from outbox.drill.scenarios.point import Given, Point, Wants, once, own
from outbox.drill.stage import Stage
from outbox.failpoints import Failpoint
from outbox.states import State


def before_commit(stage: Stage) -> None:
    _kill_web(stage, at=Failpoint.ENQUEUED)
    stage.let_pass()


def after_commit(stage: Stage) -> None:
    _kill_web(stage, at=Failpoint.COMMITTED)
    stage.await_end()


def _kill_web(stage: Stage, *, at: Failpoint) -> None:
    stage.start({"web": stage.stop_at(at)})
    stage.place()
    stage.await_stop("web", at=at)
    stage.kill("web")
    stage.start()


def after_publish(stage: Stage) -> None:
    """Web cannot publish and no worker runs yet, so that both deliveries are the dispatcher's."""
    with no_broker() as web:
        stage.start_without_worker({"web": web, "dispatcher": stage.stop_at(Failpoint.FLUSHED)})
        stage.place()
        stage.await_stop("dispatcher", at=Failpoint.FLUSHED)
        stage.kill("dispatcher")
        stage.start_only({"dispatcher": {}})
        stage.await_state(State.PUBLISHED)
        stage.start_only({"worker": {}})
        stage.await_end()
        stage.await_discard()


@contextmanager
def no_broker() -> Iterator[Env]:
    """The environment of a process whose broker refuses connections.

    Nobody else can take its port meanwhile.
    """
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield broker_variables(f"redis://127.0.0.1:{bound.getsockname()[1]}/0")


def _nothing(given: Given) -> Wants:
    return {"killed": KILLED, "business": 0, "jobs": 0, "effects": 0}


def chain_between_steps(stage: Stage) -> None:
    stage.start({"worker": stage.stop_at(Failpoint.COMMITTED)})
    stage.owe_chain(tasks.touch, tasks.touch_atomically)
    stage.await_stop("worker", at=Failpoint.COMMITTED)
    stage.note(steps_when_it_died=[str(job.state) for job in stage.jobs()])
    stage.kill("worker")
    stage.start()
    stage.await_end()


POINTS = (
    Point(
        name="before-commit",
        summary="SIGKILL the web before the {business}'s transaction commits",
        expected="neither {business} nor job exists; nothing is sent",
        play=before_commit,
        wants=_nothing,
        risk="none for the record; whoever placed the {business} saw an error and must ask again",
    ),
    Point(
        name="after-commit",
        summary="SIGKILL the web after the commit, before it publishes",
        expected="the dispatcher finds the job and publishes it; one {effect}",
        play=after_commit,
        wants=lambda given: once(),
        risk="none known; the {effect} comes later by up to one pass of the dispatcher",
    ),
    Point(
        name="after-publish",
        summary="SIGKILL the dispatcher after it published, before it marks the row",
        expected=(
            "published again under the same ID; of two deliveries the second is discarded; "
            "one {effect}"
        ),
        play=after_publish,
        wants=lambda given: once(deliveries=2, discarded=1),
        risk="none known; a repeated message costs the worker one look at the row",
    ),
    Point(
        name="chain-between-steps",
        summary="SIGKILL the worker after a step of a chain ended, before it publishes the next",
        expected="the next step is in the database and runs; each step once",
        play=chain_between_steps,
        wants=lambda given: own(
            killed=KILLED,
            jobs=2,
            effects=2,
            keys=2,
            steps_when_it_died=[State.SUCCEEDED, State.PENDING],
        ),
        risk="none known",
    ),
)

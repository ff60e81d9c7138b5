"""The stop points as data: whom each kills and where, how it is played, what has to come out."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from outbox.drill.environment import broker_variables
from outbox.drill.facts import KILLED
from outbox.drill.fleet import Name
from outbox.drill.stage import Stage
from outbox.drill.subject import Kind
from outbox.failpoints import Failpoint
from outbox.states import State

Wants = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A stop point. Its texts may say {effect}, {business} and {attempts}."""

    name: str
    kills: Name | None
    when: str
    expected: str
    play: Callable[[Stage], None]
    #: What `Facts.values` must hold, from the effect's kind and the number of attempts.
    wants: Callable[[Kind, int], Wants]
    uncertain: str = "nothing was uncertain: the record alone decides"
    risk: str

    @property
    def line(self) -> str:
        """What it does, in any subject's words."""
        words = texts(self, kind="blind", effect="effect", business="business row", attempts=1)
        return words.summary


@dataclass(frozen=True, kw_only=True)
class Texts:
    """A point's sentences for one subject, and the subject's words."""

    effect: str
    business: str
    summary: str
    expected: str
    uncertain: str
    risk: str


def texts(point: Point, *, kind: Kind, effect: str, business: str, attempts: int) -> Texts:
    """The point's sentences in the subject's words."""
    words = {"effect": effect, "business": business, "attempts": attempts}
    known = _KNOWN_TO_BE_SAFE if point.play is after_effect and kind != "blind" else {}
    who = f"SIGKILL the {point.kills}" if point.kills else "no process dies"
    return Texts(
        effect=effect,
        business=business,
        summary=f"{who} {point.when.format(**words)}",
        expected=known.get("expected", point.expected).format(**words),
        uncertain=known.get("uncertain", point.uncertain).format(**words),
        risk=known.get("risk", point.risk).format(**words),
    )


def before_commit(stage: Stage) -> None:
    _kill_web(stage, at=Failpoint.ENQUEUED)
    stage.let_pass()


def after_commit(stage: Stage) -> None:
    _kill_web(stage, at=Failpoint.COMMITTED)
    stage.await_end()


def _kill_web(stage: Stage, *, at: Failpoint) -> None:
    stage.start(web=stage.fleet.stop_at(at))
    stage.place()
    stage.await_stop("web", at=at)
    stage.kill("web")
    stage.start()


def after_publish(stage: Stage) -> None:
    """Web cannot publish and no worker runs yet, so that both deliveries are the dispatcher's."""
    stage.fleet.stop("worker")
    with _closed_port() as port:
        web = broker_variables(f"redis://127.0.0.1:{port}/0")
        dispatcher = stage.fleet.stop_at(Failpoint.FLUSHED)
        stage.start_only(web=web, dispatcher=dispatcher)
        stage.place()
        stage.await_stop("dispatcher", at=Failpoint.FLUSHED)
        stage.kill("dispatcher")
        stage.start_only(dispatcher={})
        stage.await_published()
        stage.start_only(worker={})
        stage.await_end()
        stage.await_discard()


def after_claim(stage: Stage) -> None:
    stage.start(worker=stage.fleet.stop_at(Failpoint.CLAIMED))
    stage.place()
    stage.await_stop("worker", at=Failpoint.CLAIMED)
    stage.await_lease_renewal()
    stage.kill("worker")
    stage.start()
    stage.await_end()


def after_effect(stage: Stage) -> None:
    stage.start(worker=stage.fleet.stop_at(Failpoint.RETURNED))
    stage.place()
    stage.await_stop("worker", at=Failpoint.RETURNED)
    stage.kill("worker")
    stage.start()
    stage.await_end()


def after_retry_limit(stage: Stage) -> None:
    stage.start()
    stage.subject.destination("refuse")
    try:
        stage.place()
        stage.await_end()
        stage.await_owner_told()
    finally:
        stage.subject.destination("ok")


@contextmanager
def _closed_port() -> Iterator[int]:
    """A port that refuses connections, and that nobody else can take meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def _once(**more: Any) -> Wants:
    found = {
        "killed": KILLED,
        "business": 1,
        "jobs": 1,
        "state": State.SUCCEEDED,
        "attempts": 1,
        "crashes": 0,
        "failures": 0,
        "effects": 1,
        "keys": 1,
    }
    return found | more


def _given_up(attempts: int) -> Wants:
    found = {
        "killed": [],
        "business": 1,
        "jobs": 1,
        "state": State.FAILED,
        "crashes": 0,
        "error kept": True,
        "effects": 0,
        "signals": 1,
        "owner mails": 1,
    }
    return found | dict.fromkeys(("attempts", "failures", "tracebacks"), attempts)


_KNOWN_TO_BE_SAFE = {
    "expected": "the lease runs out, the job is run again under the same ID; still one {effect}",
    "uncertain": "the effect's own kind decided: what had happened did not happen again",
    "risk": "none known",
}

POINTS = (
    Point(
        name="before-commit",
        kills="web",
        when="before the {business}'s transaction commits",
        expected="neither {business} nor job exists; nothing is sent",
        play=before_commit,
        wants=lambda kind, attempts: {
            "killed": KILLED,
            "business": 0,
            "jobs": 0,
            "effects": 0,
        },
        risk="none for the record; whoever placed the {business} saw an error and must ask again",
    ),
    Point(
        name="after-commit",
        kills="web",
        when="after the commit, before it publishes",
        expected="the dispatcher finds the job and publishes it; one {effect}",
        play=after_commit,
        wants=lambda kind, attempts: _once(),
        risk="none known; the {effect} comes later by up to one pass of the dispatcher",
    ),
    Point(
        name="after-publish",
        kills="dispatcher",
        when="after it published, before it marks the row",
        expected=(
            "published again under the same ID; of two deliveries the second is discarded; "
            "one {effect}"
        ),
        play=after_publish,
        wants=lambda kind, attempts: _once(deliveries=2, discarded=1),
        risk="none known; a repeated message costs the worker one look at the row",
    ),
    Point(
        name="after-claim",
        kills="worker",
        when="after its claim, before the effect",
        expected=(
            "the lease runs out, the job is claimed again; two attempts, one crash, one {effect}"
        ),
        play=after_claim,
        wants=lambda kind, attempts: _once(attempts=2, crashes=1),
        risk="none known; the {effect} comes later by up to one lease and the crash backoff",
    ),
    Point(
        name="after-effect",
        kills="worker",
        when="after the effect, before its completion is recorded",
        expected=(
            "two {effect}s under one key: the record cannot know of the first, so the job is "
            "run again (two attempts, one crash)"
        ),
        play=after_effect,
        wants=lambda kind, attempts: _once(
            attempts=2, crashes=1, effects=2 if kind == "blind" else 1
        ),
        uncertain=("by running it again: nobody could be asked whether the first {effect} arrived"),
        risk=(
            "a worker that dies in this moment sends the {effect} twice; whoever receives it can "
            "tell by the key, nothing else prevents it"
        ),
    ),
    Point(
        name="after-retry-limit",
        kills=None,
        when="while the destination refuses every attempt",
        expected=(
            "failed after {attempts} attempts; the error and each attempt's traceback are kept; "
            "the owner is told by signal and by one mail"
        ),
        play=after_retry_limit,
        wants=lambda kind, attempts: _given_up(attempts),
        risk="the {effect} is not sent until its owner retries the job",
    ),
)
BY_NAME: Mapping[str, Point] = {point.name: point for point in POINTS}

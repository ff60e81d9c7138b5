"""A worker dies after an effect and before it is recorded, for each kind of destination."""

from __future__ import annotations

from outbox.drill import tasks
from outbox.drill.facts import KILLED
from outbox.drill.scenarios.point import Given, Point, Wants, once, own
from outbox.drill.stage import Stage
from outbox.failpoints import Failpoint
from outbox.states import State, Verb


def after_effect_verified(stage: Stage) -> None:
    _die_after_effect(stage, kind="verified")
    stage.await_end()
    _note_requests(stage)


def after_effect_repeated_with_key(stage: Stage) -> None:
    _die_after_effect(stage, kind="keyed")
    stage.await_end()
    _note_requests(stage)


def after_effect_sent_again(stage: Stage) -> None:
    _die_after_effect(stage, kind="repeated")
    stage.await_end()


def after_effect_parked(stage: Stage) -> None:
    _die_after_effect(stage, kind="parked")
    stage.await_state(State.UNCERTAIN)
    stage.await_owner_told()
    stage.note(
        status_counts=stage.status({})["counts"]["uncertain"],
        effects_when_asked=len(stage.facts().effects),
        attempts_when_asked=stage.job().attempts,
    )
    (effect,) = stage.unsettled()
    stage.resolve(effect=effect, happened=True)
    stage.await_end()


def _die_after_effect(stage: Stage, *, kind: str) -> None:
    """Kill the worker that has had its answer from the destination, and has not recorded it."""
    sending = stage.sent_as(kind)
    stage.start({"worker": {**sending, **stage.stop_at(Failpoint.PERFORMED)}})
    stage.place()
    stage.await_stop("worker", at=Failpoint.PERFORMED)
    stage.kill("worker")
    stage.start({"worker": sending})


def after_effect_atomic(stage: Stage) -> None:
    stage.start({"worker": stage.stop_at(Failpoint.RETURNED)})
    stage.owe(tasks.touch_atomically)
    stage.await_stop("worker", at=Failpoint.RETURNED)
    stage.kill("worker")
    stage.start()
    stage.await_end()


def provider_timeout_but_done(stage: Stage) -> None:
    stage.start({"worker": stage.sent_as("verified")})
    stage.subject.destination("silent")
    try:
        stage.place()
        stage.await_event(Verb.RETRY)
    finally:
        stage.subject.destination("ok")
    stage.strike()
    stage.await_end()
    _note_requests(stage)


def _note_requests(stage: Stage) -> None:
    """How often the destination was asked for it, whatever it made of that."""
    stage.note(requests=stage.requests())


def _parked(given: Given) -> Wants:
    return once(
        attempts=3,
        crashes=1,
        status_counts=1,
        effects_when_asked=1,
        attempts_when_asked=2,
        owner_mails=1,
    )


_PERFORMED = "SIGKILL the worker once the destination has answered, before that is recorded"

POINTS = (
    Point(
        name="after-effect-verified",
        summary=f"{_PERFORMED}; the destination can be asked by the key",
        expected="the next attempt asks, finds it and records it; one request, one {effect}",
        play=after_effect_verified,
        needs="verified",
        wants=lambda given: once(attempts=2, crashes=1, requests=1),
        uncertain="by asking the destination for the key: it had it",
        risk="a destination that answers wrongly for a key that it has",
    ),
    Point(
        name="after-effect-repeated-with-key",
        summary=f"{_PERFORMED}; the destination drops what comes again under the same key",
        expected="the next attempt requests it again under that key; two requests, one {effect}",
        play=after_effect_repeated_with_key,
        needs="keyed",
        wants=lambda given: once(attempts=2, crashes=1, requests=2),
        uncertain="by the same request under the same key: the destination made one of the two",
        risk=(
            "a destination that forgets its keys sooner than repeat_within says would do it twice"
        ),
    ),
    Point(
        name="after-effect-sent-again",
        summary=f"{_PERFORMED}; it can only be asked by a person, and may be repeated",
        expected="two {effect}s under one key, as the setting allows; two attempts, one crash",
        play=after_effect_sent_again,
        needs="repeated",
        wants=lambda given: once(attempts=2, crashes=1, effects=2),
        uncertain="by doing it again under the same key, since the setting says so",
        risk=(
            "whoever receives the {effect} may see it twice, and can tell by the key; the setting "
            "that asks a person instead is drilled at after-effect-parked"
        ),
    ),
    Point(
        name="after-effect-parked",
        summary=f"{_PERFORMED}; it can only be asked by a person",
        expected=(
            "the next attempt does not touch it: uncertain, the owner is told; after a person's "
            "word that it happened the body runs on; one {effect}"
        ),
        play=after_effect_parked,
        needs="parked",
        wants=_parked,
        uncertain="by a person, who looked at the other side",
        risk="the job waits until its owner has looked",
    ),
    Point(
        name="after-effect-atomic",
        summary="SIGKILL the worker after the body of an atomic task, before it commits",
        expected="what the body wrote is undone with its end, and written once by the next attempt",
        play=after_effect_atomic,
        wants=lambda given: own(killed=KILLED, attempts=2, crashes=1),
        risk="none known",
    ),
    Point(
        name="provider-timeout-but-done",
        summary="nobody dies; the destination does it and never answers",
        expected="a failure that is tried again, and asks first; one request, one {effect}",
        play=provider_timeout_but_done,
        needs="verified",
        wants=lambda given: once(killed=[], attempts=2, failures=1, requests=1),
        uncertain="by asking the destination for the key: it had it",
        risk="a destination that answers wrongly for a key that it has",
    ),
)

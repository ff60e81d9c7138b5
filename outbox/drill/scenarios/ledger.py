"""The ledger, when somebody dies or sleeps whose effect only a person can be asked about."""

from __future__ import annotations

from outbox.drill import ledgers, tasks
from outbox.drill.facts import KILLED
from outbox.drill.scenarios.point import Point, own
from outbox.drill.stage import Stage
from outbox.events import LATE
from outbox.failpoints import Failpoint
from outbox.states import State, Verb


def three_effects_middle_unknown(stage: Stage) -> None:
    stage.start({"worker": stage.stop_at(Failpoint.PERFORMED)})
    stage.owe_chain(ledgers.pay_thrice, tasks.touch)
    stage.await_stop("worker", at=Failpoint.PERFORMED)
    stage.fleet.arm(Failpoint.PERFORMED)  # the first goes on, and the second stops
    stage.await_stop("worker", at=Failpoint.PERFORMED)
    stage.kill("worker")
    stage.start()
    stage.await_state(State.UNCERTAIN)
    stage.note(begun=stage.unsettled())
    stage.resolve(effect=ledgers.NAMES[1], happened=True)
    stage.await_end()


def effect_begun_by_a_zombie(stage: Stage) -> None:
    _sleep_at(stage, Failpoint.CLAIMED)
    stage.await_end()
    ended = stage.job()
    stage.let_go(Failpoint.CLAIMED)
    stage.thaw("worker")
    stage.await_event(LATE)
    stage.let_pass()
    stage.note(changed_by_the_late_one=stage.job().written != ended.written)


def late_worker_tells_the_truth(stage: Stage) -> None:
    _sleep_at(stage, Failpoint.PERFORMED)
    stage.await_state(State.UNCERTAIN)
    stage.strike()
    stage.let_go(Failpoint.PERFORMED)
    stage.thaw("worker")
    stage.await_state(State.SUCCEEDED)
    stage.await_end()
    stage.note(answered_by=[event.actor for event in stage.job().seen(Verb.RESOLVE)])


def _sleep_at(stage: Stage, point: Failpoint) -> None:
    """Freeze the whole worker there, and let another one take over."""
    stage.start({"worker": stage.stop_at(point)})
    stage.owe(ledgers.pay)
    stage.await_stop("worker", at=point)
    stage.freeze("worker")
    stage.start_only({"second worker": {}})


def same_key_other_request(stage: Stage) -> None:
    stage.start({"worker": stage.stop_at(Failpoint.RETURNED)})
    stage.owe(ledgers.pay_another)
    stage.await_stop("worker", at=Failpoint.RETURNED)
    stage.kill("worker")
    stage.start()
    stage.await_end()
    stage.await_owner_told()
    stage.note(error_says_so="another request" in stage.job().error)


def crash_cap_with_effect_begun(stage: Stage) -> None:
    stage.start({"worker": stage.stop_at(Failpoint.BEGUN)})
    stage.owe(ledgers.pay_once)
    pid = stage.await_stop("worker", at=Failpoint.BEGUN)
    stage.kill_child(pid)
    stage.await_state(State.UNCERTAIN)
    stage.await_owner_told()
    stage.note(effects_when_asked=len(stage.facts().effects))
    (effect,) = stage.unsettled()
    stage.resolve(effect=effect, happened=False)
    stage.await_end()


POINTS = (
    Point(
        name="three-effects-middle-unknown",
        summary="SIGKILL the worker in the second of three effects; a chain follows the job",
        expected=(
            "uncertain for the second alone; after a person's word that it happened the third and "
            "the chain follow; each effect once"
        ),
        play=three_effects_middle_unknown,
        wants=lambda given: own(
            killed=KILLED,
            jobs=2,
            attempts=[3, 1],
            crashes=[1, 0],
            begun=["second"],
            effects=4,
            keys=4,
            owner_mails=1,
        ),
        uncertain="by a person, of that effect alone",
        risk="the job waits until its owner has looked",
    ),
    Point(
        name="effect-begun-by-a-zombie",
        summary=(
            "SIGSTOP the whole worker past its lease before its effect; SIGCONT it when another "
            "has done it"
        ),
        expected="the late run may not begin the effect; two attempts, one crash, one effect",
        play=effect_begun_by_a_zombie,
        wants=lambda given: own(
            attempts=2, crashes=1, late_events=1, changed_by_the_late_one=False
        ),
        risk="a process that is stopped between begin and call, and wakes up later, does it",
    ),
    Point(
        name="late-worker-tells-the-truth",
        summary="SIGSTOP the whole worker past its lease when its call succeeded; SIGCONT later",
        expected=(
            "the next attempt parks; the late one records that its call succeeded, and the body "
            "runs on without a person; three attempts, one crash, one effect"
        ),
        play=late_worker_tells_the_truth,
        wants=lambda given: own(attempts=3, crashes=1, answered_by=["reconcile"]),
        uncertain="by the late worker itself, which knew",
        risk="none known; until it wakes up a person is asked",
    ),
    Point(
        name="same-key-other-request",
        summary="SIGKILL the worker after a recorded effect; the next attempt asks for another",
        expected="failed, for a reason that says so, and no second effect; the owner is told",
        play=same_key_other_request,
        wants=lambda given: own(
            killed=KILLED,
            state=State.FAILED,
            attempts=2,
            crashes=1,
            failures=1,
            owner_mails=1,
            error_says_so=True,
        ),
        risk="the task's mistake has to be mended before a retry can succeed",
    ),
    Point(
        name="crash-cap-with-effect-begun",
        summary="SIGKILL the child in its last allowed run, when its effect has just been begun",
        expected=(
            "not failed but uncertain, and the owner is told; after a person's word that it did "
            "not happen it is done once"
        ),
        play=crash_cap_with_effect_begun,
        wants=lambda given: own(
            killed=KILLED, attempts=2, crashes=1, effects_when_asked=0, owner_mails=1
        ),
        uncertain="by a person, who looked at the other side",
        risk="the job waits until its owner has looked",
    ),
)

"""A worker or one of its children is killed, or stopped, while it has a job."""

from __future__ import annotations

from outbox.drill.environment import TIMES
from outbox.drill.facts import KILLED
from outbox.drill.record import Job
from outbox.drill.scenarios.point import Given, Point, Wants, once
from outbox.drill.stage import Stage
from outbox.events import LATE
from outbox.failpoints import Failpoint
from outbox.states import State


def after_claim(stage: Stage) -> None:
    stage.start({"worker": stage.stop_at(Failpoint.CLAIMED)})
    stage.place()
    stage.await_stop("worker", at=Failpoint.CLAIMED)
    stage.await_lease_renewal()
    stage.kill("worker")
    stage.start()
    stage.await_end()


def after_effect(stage: Stage) -> None:
    stage.start({"worker": stage.stop_at(Failpoint.RETURNED)})
    stage.place()
    stage.await_stop("worker", at=Failpoint.RETURNED)
    stage.kill("worker")
    stage.start()
    stage.await_end()


def child_killed(stage: Stage) -> None:
    stage.start({"worker": stage.stop_at(Failpoint.CLAIMED)})
    stage.place()
    pid = stage.await_stop("worker", at=Failpoint.CLAIMED)
    before = stage.job()
    stage.kill_child(pid)
    stage.await_end()
    _note_crash(stage, running=before)


def poison_pill(stage: Stage) -> None:
    stage.start({"worker": stage.stop_at(Failpoint.CLAIMED)})
    stage.place()
    for attempt in range(stage.means.crashes):
        pid = stage.await_stop("worker", at=Failpoint.CLAIMED)
        if not attempt:
            stage.place()  # a second job, for the other child
            stage.await_state(State.SUCCEEDED)
        last = attempt + 1 == stage.means.crashes
        stage.kill_child(pid, rearm=None if last else Failpoint.CLAIMED)
    stage.await_end()
    stage.await_owner_told()
    stage.note(reason_names_the_cap=f"at most {stage.means.crashes}" in stage.job().error)


def worker_killed_mid_run(stage: Stage) -> None:
    with stage.hanging_destination() as behave:
        _kill_hanging_worker(stage)
        stage.await_event("crash")
        behave("ok")
        stage.await_end()


def same_hostname_reused(stage: Stage) -> None:
    with stage.hanging_destination() as behave:
        before = _kill_hanging_worker(stage)
        stage.await_event("crash")
        behave("ok")
        stage.await_end()
    _note_crash(stage, running=before)


def two_recoverers(stage: Stage) -> None:
    with stage.hanging_destination() as behave:
        stage.start({"second dispatcher": {}})
        _kill_hanging_worker(stage)
        stage.await_event("crash")
        behave("ok")
        stage.await_end()


def _kill_hanging_worker(stage: Stage) -> Job:
    """Mid-run; the same command starts it again at once. The job, as the dead one left it."""
    stage.start()
    stage.place()
    stage.await_hanging()
    stage.kill("worker")
    left = stage.job()
    stage.start()
    return left


def duplicate_dies(stage: Stage) -> None:
    with stage.hanging_destination() as behave:
        stage.start({"worker": stage.stop_at(Failpoint.DELIVERED, armed=False)})
        stage.place()
        stage.await_hanging()
        stage.fleet.arm(Failpoint.DELIVERED)
        job = stage.job()
        stage.means.broker.deliver_copy(job.id)
        pid = stage.await_stop("worker", at=Failpoint.DELIVERED)
        stage.note(dies_in_another_child=pid != job.lease_pid)
        stage.kill_child(pid)
        stage.await_renewals(seconds=1.5)  # at least two: the clerk has long seen the dead child
        behave("ok")
        stage.await_end()


def long_job(stage: Stage) -> None:
    with stage.hanging_destination() as behave:
        stage.start()
        stage.place()
        stage.await_hanging()
        stage.start_only({"second worker": {}})
        stage.await_renewals(seconds=TIMES["LEASE"])
        behave("ok")
        stage.await_end()


def stopped_past_its_lease(stage: Stage) -> None:
    with stage.hanging_destination() as behave:
        stage.start()
        stage.place()
        stage.await_hanging()
        stage.freeze("worker")
        stage.start_only({"second worker": {}})
        stage.await_run(2)
        behave("ok")
        stage.await_end()
        ended = stage.job()
        stage.thaw("worker")
        stage.await_event(LATE)
        stage.let_pass()
        after = stage.job()
    stage.note(changed_by_the_late_one=after.written != ended.written)


def _note_crash(stage: Stage, *, running: Job) -> None:
    """By whom the crash was counted, and whether the lease that the run last had was over."""
    for event in stage.job().seen("crash")[:1]:
        until = running.lease_until
        stage.note(crash_counted_by=event.actor, lease_was_over=bool(until and event.at >= until))


def _pill(given: Given) -> Wants:
    return once(
        killed=KILLED * given.crashes,
        business=2,
        jobs=2,
        state=[State.FAILED, State.SUCCEEDED],
        attempts=[given.crashes, 1],
        crashes=[given.crashes, 0],
        reason_names_the_cap=True,
        owner_mails=1,
    )


_AGAIN = "runs it again; two attempts, one crash, one {effect}"

POINTS = (
    Point(
        name="after-claim",
        summary="SIGKILL the worker after its claim, before the effect",
        expected=(
            "the lease runs out, the job is claimed again; two attempts, one crash, one {effect}"
        ),
        play=after_claim,
        wants=lambda given: once(attempts=2, crashes=1),
        risk="none known; the {effect} comes later by up to one lease and the crash backoff",
    ),
    Point(
        name="after-effect",
        summary="SIGKILL the worker after the body, before its completion is recorded",
        expected=(
            "two {effect}s under one key: the record cannot know of the first, so the job is "
            "run again (two attempts, one crash)"
        ),
        play=after_effect,
        wants=lambda given: once(attempts=2, crashes=1, effects=1 if given.is_told else 2),
        uncertain="by running it again: nobody could be asked whether the first {effect} arrived",
        risk=(
            "a worker that dies in this moment sends the {effect} twice; whoever receives it can "
            "tell by the key, nothing else prevents it"
        ),
        other={
            "expected": (
                "the lease runs out, the job is run again under the same ID; still one {effect}"
            ),
            "uncertain": "nothing was: what had happened was known, and did not happen again",
            "risk": "none known",
        },
        other_where=lambda given: given.is_told,
    ),
    Point(
        name="child-killed",
        summary="SIGKILL the child that has claimed the job, as the out-of-memory killer does",
        expected=f"its worker sees it die, counts the crash before the lease is over, and {_AGAIN}",
        play=child_killed,
        wants=lambda given: once(
            attempts=2, crashes=1, crash_counted_by="clerk", lease_was_over=False
        ),
        risk="none known; the {effect} comes later by the crash backoff",
    ),
    Point(
        name="poison-pill",
        summary="SIGKILL the child of every attempt, as a job does that kills whoever runs it",
        expected=(
            "failed after {crashes} crashes, for a reason that says so, and the owner is told by a "
            "mail; another job of the same worker succeeds meanwhile"
        ),
        play=poison_pill,
        wants=_pill,
        risk="the {effect} of such a job is not sent until its owner has seen to it",
    ),
    Point(
        name="worker-killed-mid-run",
        summary="SIGKILL the whole worker while the destination keeps its run waiting",
        expected=f"the lease runs out, another worker {_AGAIN}",
        play=worker_killed_mid_run,
        wants=lambda given: once(attempts=2, crashes=1),
        risk=(
            "a destination that accepts what a dead client sent would see the {effect} twice; "
            "here it noticed that the connection was cut"
        ),
    ),
    Point(
        name="duplicate-dies-beside-the-original",
        summary="SIGKILL the child that got a second delivery of a job that runs in another one",
        expected="the original goes on untouched; one attempt, no crash, one {effect}",
        play=duplicate_dies,
        wants=lambda given: once(deliveries=2, dies_in_another_child=True),
        risk="none known",
    ),
    Point(
        name="long-job-beside-a-restart",
        summary="no process dies while a job runs longer than its lease and a second worker starts",
        expected="the lease is renewed and nothing is taken over; one attempt, one {effect}",
        play=long_job,
        wants=lambda given: once(killed=[], discarded=0),
        risk="none known",
    ),
    Point(
        name="stopped-past-its-lease",
        summary="SIGSTOP the whole worker past its lease; SIGCONT it when another has taken over",
        expected=(
            "the late run's end is refused and changes nothing; two attempts, one crash, two "
            "{effect}s under one key"
        ),
        play=stopped_past_its_lease,
        wants=lambda given: once(
            killed=[],
            attempts=2,
            crashes=1,
            effects=2 if given.is_blind else 1,
            late_events=1,
            changed_by_the_late_one=False,
        ),
        uncertain="by running it again: nobody could be asked whether the first {effect} arrived",
        risk=(
            "a stopped process cannot take back what it had begun: its {effect} arrives beside "
            "the second run's; whoever receives them can tell by the key"
        ),
        other={
            "expected": (
                "the late run's end is refused and changes nothing; two attempts, one crash, "
                "still one {effect}"
            ),
            "uncertain": "the effect's own kind decided: what had happened did not happen again",
            "risk": "none known",
        },
    ),
    Point(
        name="two-recoverers",
        summary="SIGKILL the worker mid-run while two dispatchers and a new worker recover",
        expected=f"one of them counts the crash, once, and a worker {_AGAIN}",
        play=two_recoverers,
        wants=lambda given: once(attempts=2, crashes=1, crash_events=1),
        risk="none known",
    ),
    Point(
        name="same-hostname-reused",
        summary="SIGKILL the worker mid-run and start one with the same host name at once",
        expected=f"the new one takes nothing over by its name: the lease runs out, and it {_AGAIN}",
        play=same_hostname_reused,
        wants=lambda given: once(
            attempts=2, crashes=1, crash_counted_by="sweep", lease_was_over=True
        ),
        risk="none known",
    ),
)

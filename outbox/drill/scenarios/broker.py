"""The broker forgets, all of it or its last second, or gives a message to a worker that dies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import outbox
from outbox.drill import looks, tasks
from outbox.drill.environment import TIMES
from outbox.drill.people import ACTOR
from outbox.drill.record import Job
from outbox.drill.scenarios.point import Point, Wants, once
from outbox.drill.stage import Stage
from outbox.states import State, Verb

PAIR = 2  # as many as the worker has children
LATER = 3600  # seconds: not due before somebody says so
LONG = 600  # seconds: a worker's request for the next message stays open


def broker_wiped(stage: Stage) -> None:
    with stage.hanging_destination() as behave:
        _run_hold_and_queue(stage)
        stage.owe(tasks.touch, countdown=LATER)
        stage.means.say("wiping the broker")
        stage.strike()
        stage.means.broker.wipe()
        outbox.run_now(stage.jobs()[-1].id, actor=ACTOR)
        _await_stranded(stage, PAIR)
        behave("ok")
        stage.await_end()
    _note_stranded(stage, "running", "held", "queued", "pending")


def broker_restarts_empty(stage: Stage) -> None:
    broker = stage.means.broker
    with stage.hanging_destination() as behave:
        _run_and_hold(stage, prefetch=4)  # it goes on asking for more, and that is cut as well
        worker = stage.fleet.pid("worker")
        stage.until(broker.is_asked, what="the worker to ask for more", who="worker")
        with _killed(stage):
            broker.lose_files()
            stage.place()
            stage.await_state(State.PENDING)
            # Else a slow worker might give back to the new one what it holds.
            stage.await_log("Cannot connect to", who="worker")
        _await_stranded(stage, PAIR)
        behave("ok")
        stage.await_end()
    _note_stranded(stage, "running", "held", "pending")
    stage.note(same_worker_lives=stage.fleet.pid("worker") == worker)


def broker_loses_last_second(stage: Stage) -> None:
    broker = stage.means.broker
    queued = _queue_pair(stage)
    mark = broker.mark()
    stage.start()
    stage.await_end()
    stage.await_holding(waiting=0, taken=0)
    lost = _queue_pair(stage) - queued
    with _killed(stage):
        broker.cut(mark)
    waiting = broker.waiting(stage.job().queue)
    stage.note(ended_and_back=len(queued & waiting), published_and_lost=len(lost - waiting))
    stage.start()
    stage.await_discard(*queued, times=PAIR)
    stage.await_end()


def _queue_pair(stage: Stage) -> set[UUID]:
    """Place two that nobody takes. All jobs so far."""
    stage.start_without_worker()
    _place_pair(stage)
    stage.await_state(State.PUBLISHED, jobs=PAIR)
    return {job.id for job in stage.jobs()}


def popped_not_recorded(stage: Stage) -> None:
    patient = {"polling_interval": LONG}
    stage.start({"worker": stage.with_settings(CELERY_BROKER_TRANSPORT_OPTIONS=patient)})
    stage.until(lambda: _stands_asking(stage), what="the worker to stand and ask", who="worker")
    stage.place()
    stage.await_state(State.PUBLISHED)
    stage.note(messages_in_the_broker=sum(stage.means.broker.holds(stage.job().queue)))
    stage.kill("worker")
    stage.start()
    stage.await_end()
    _note_looks(stage, apart=TIMES["RECONCILE_EVERY"] / 2)


def _stands_asking(stage: Stage) -> bool:
    """Whether its request for a message is open now that it is stopped. Else it goes on."""
    stage.fleet.freeze("worker", alone=True)
    if stage.means.broker.is_asked():
        return True
    stage.fleet.thaw("worker", alone=True)
    return False


def prefetched_by_a_dead_worker(stage: Stage) -> None:
    with stage.hanging_destination() as behave:
        _run_and_hold(stage)
        stage.await_state(State.PUBLISHED, jobs=PAIR)
        stage.kill("worker")
        stage.await_cut()
        behave("ok")
        stage.start()
        stage.await_end()
    _note_looks(stage, apart=TIMES["LEASE"])
    stage.await_holding(waiting=0, taken=2 * PAIR)
    stage.means.say("giving back what the dead worker held, as after the visibility timeout")
    for job in stage.jobs():
        stage.means.broker.restore(job.id)
    stage.await_holding(waiting=0, taken=0)
    stage.let_pass()


def _run_and_hold(stage: Stage, *, prefetch: int = 2) -> None:
    """Two jobs hang at the destination, and the worker holds two more."""
    stage.start({"worker": stage.with_settings(CELERY_WORKER_PREFETCH_MULTIPLIER=prefetch)})
    _place_pair(stage)
    stage.await_hanging(runs=PAIR)
    _place_pair(stage)
    stage.await_holding(waiting=0, taken=2 * PAIR)


def _run_hold_and_queue(stage: Stage) -> None:
    """And two more wait in the queue."""
    _run_and_hold(stage)
    _place_pair(stage)
    stage.await_holding(waiting=PAIR, taken=2 * PAIR)
    stage.await_state(State.PUBLISHED, jobs=2 * PAIR)


def _place_pair(stage: Stage) -> None:
    for _ in range(PAIR):
        stage.place()


@contextmanager
def _killed(stage: Stage) -> Iterator[None]:
    """The broker; it is started again whatever happens, since others need it."""
    stage.means.say("sending SIGKILL to the broker")
    stage.strike()
    stage.means.broker.kill()
    try:
        yield
    finally:
        stage.means.broker.start()


def _await_stranded(stage: Stage, jobs: int) -> None:
    """Wait until so many were found missing; note that what hangs is in its first run by then."""
    stage.until(
        lambda: len(_stranded(stage.jobs())) >= jobs,
        what=f"{jobs} to be found missing in the broker",
        who="dispatcher",
    )
    runs = [job for job in stage.jobs() if job.state == State.RUNNING]
    stage.note(hanging_runs_by_then=[job.attempts for job in runs])


def _stranded(jobs: tuple[Job, ...]) -> list[Job]:
    return [job for job in jobs if job.seen(Verb.STRAND)]


def _note_stranded(stage: Stage, *kinds: str) -> None:
    """How many of each kind of jobs, in the order in which they were placed."""
    jobs = stage.jobs()
    counts = [len(_stranded(jobs[at : at + PAIR])) for at in range(0, len(jobs), PAIR)]
    found = (f"{count} {kind}" for count, kind in zip(counts, kinds, strict=True))
    stage.note(stranded=", ".join(found))


def _note_looks(stage: Stage, *, apart: float) -> None:
    """Whether a look so many seconds earlier had missed what was then owed again."""
    repairs = [(job.id, event.at) for job in stage.jobs() for event in job.seen(Verb.STRAND)]
    spans = [looks.seconds_missed(job_id, until=at) for job_id, at in repairs]
    stage.note(confirmed_by_a_later_look=bool(spans) and min(spans) >= apart)


def _each(jobs: int) -> Wants:
    """So many jobs, with one effect each."""
    return dict.fromkeys(("jobs", "effects", "keys"), jobs)


POINTS = (
    Point(
        name="broker-wiped",
        summary=(
            "wipe the broker (FLUSHALL) while two jobs run, the worker holds two more, two wait in "
            "the queue, and one is not due"
        ),
        expected=(
            "what waited in the queue is found missing and published again; what runs or is held "
            "is left alone; seven jobs with one attempt and one effect each"
        ),
        play=broker_wiped,
        wants=lambda given: once(
            **_each(3 * PAIR + 1),
            killed=[],
            business=3 * PAIR,
            deliveries=3 * PAIR + 1,
            hanging_runs_by_then=[1] * PAIR,
            discarded=0,
            stranded="0 running, 0 held, 2 queued, 0 pending",
        ),
        risk="none known; what the broker lost comes later by the grace and two looks",
    ),
    Point(
        name="broker-restarts-empty",
        summary=(
            "SIGKILL the broker and start it without its file, while two jobs run and the worker "
            "holds two more; place one meanwhile"
        ),
        expected=(
            "the worker outlives it, and what ran goes on; what was held is found missing and "
            "published again; five jobs with one attempt and one {effect} each"
        ),
        play=broker_restarts_empty,
        wants=lambda given: once(
            **_each(2 * PAIR + 1),
            killed=[],
            business=2 * PAIR + 1,
            deliveries=3 * PAIR + 1,
            hanging_runs_by_then=[1] * PAIR,
            discarded=0,
            stranded="0 running, 2 held, 0 pending",
            same_worker_lives=True,
        ),
        risk="none known; what the broker lost comes later by the grace and two looks",
    ),
    Point(
        name="broker-loses-last-second",
        summary=(
            "SIGKILL the broker and cut its file to where it was before two jobs ran and two "
            "others were published"
        ),
        expected=(
            "the two that had ended are delivered again and run nothing; the two whose messages "
            "are lost are published again; one attempt and one {effect} each"
        ),
        play=broker_loses_last_second,
        wants=lambda given: once(
            **_each(2 * PAIR),
            killed=[],
            business=2 * PAIR,
            deliveries=3 * PAIR,
            discarded=PAIR,
            ended_and_back=PAIR,
            published_and_lost=PAIR,
            strand_events=PAIR,
        ),
        risk="none known; a broker that syncs each write loses nothing, and is slower",
    ),
    Point(
        name="popped-not-recorded",
        summary=(
            "SIGSTOP the worker's main process while it asks for the next message, publish one, "
            "and SIGKILL the worker: the message was only in its socket"
        ),
        expected=(
            "it is in no queue and not among the unacknowledged; a second look at the broker "
            "confirms that, and it is published again; one attempt, one {effect}"
        ),
        play=popped_not_recorded,
        wants=lambda given: once(
            messages_in_the_broker=0,
            deliveries=1,
            discarded=0,
            strand_events=1,
            confirmed_by_a_later_look=True,
        ),
        risk="none known; the {effect} comes later by the grace and two looks",
    ),
    Point(
        name="prefetched-by-a-dead-worker",
        summary="SIGKILL a worker that runs two jobs and holds two more, and start another",
        expected=(
            "what ran crashes once and runs again; what was only held is published again after the "
            "grace and a lease, with one attempt; when the broker gives back the dead worker's "
            "four messages they run nothing; one {effect} each"
        ),
        play=prefetched_by_a_dead_worker,
        wants=lambda given: once(
            **_each(2 * PAIR),
            business=2 * PAIR,
            attempts=[2] * PAIR + [1] * PAIR,
            crashes=[1] * PAIR + [0] * PAIR,
            deliveries=6 * PAIR,
            discarded=2 * PAIR,
            strand_events=PAIR,
            confirmed_by_a_later_look=True,
        ),
        risk=(
            "a destination that accepts what a dead client sent would see the {effect} twice; "
            "here it noticed that the connection was cut"
        ),
    ),
)

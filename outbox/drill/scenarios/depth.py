"""Messages that wait for long, in a deep queue or in a worker's hands: nobody repeats them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from signal import SIGTERM

from django.db import transaction

from outbox.drill import tasks
from outbox.drill.environment import TIMES
from outbox.drill.fleet import Env
from outbox.drill.record import Pass
from outbox.drill.scenarios.point import Point, own
from outbox.drill.stage import Stage
from outbox.states import FINAL, State
from outbox.tasks import OutboxTask
from outbox.ticks import RECONCILE

SLOW = 2  # jobs that keep both children of the worker
DEEP = 300  # jobs behind them
HELD = 8  # what a worker of two children prefetches
WAITING = 4  # more than it can hold
TRICKLING = 4  # of which one runs at once
LONG = 3 * TIMES["STRAND_GRACE"]  # more than the grace, a lease and a second look

#: Reconcile's own, where a worker stands still: nothing but its dispatcher goes by them.
QUICK = {"LEASE": 1, "DISPATCH_EVERY": 0.3, "STRAND_GRACE": 1, "RECONCILE_EVERY": 0.5}
STORMY = 2 * QUICK["STRAND_GRACE"] + QUICK["LEASE"]  # when a doubled grace would be over


def deep_queue(stage: Stage) -> None:
    jobs = SLOW + DEEP
    with _lingering(stage):
        stage.start()
        _owe(stage, tasks.linger, times=SLOW)
        stage.await_state(State.RUNNING, jobs=SLOW)
        _owe(stage, tasks.touch, times=DEEP)
        what = "all to be published"
        stage.until(lambda: stage.count(State.PUBLISHED) == DEEP, what=what, who="dispatcher")
        stage.await_taken(HELD)
        passes = stage.watch(RECONCILE, after=stage.means.database.now(), seconds=LONG)
        _note_untouched(stage, passes)
        stage.note(fewest_seen_waiting=min(each.found["queued"] for each in passes))
    stage.until(lambda: stage.count(*FINAL) == jobs, what="all to end", who="worker")
    _end_with_publishes(stage)


def stalled_worker(stage: Stage) -> None:
    quick = stage.with_settings(OUTBOX=QUICK)
    stage.start({"dispatcher": quick})
    stage.fleet.freeze_children("worker")
    _owe(stage, tasks.touch, times=HELD + WAITING)
    stage.await_taken(HELD)
    stage.freeze("worker")
    what = "what it holds to be published again"
    stage.until(lambda: _publishes(stage) >= 2 * HELD + WAITING, what=what, who="dispatcher")
    before, now = _publishes(stage), stage.means.database.now()
    passes = stage.watch(RECONCILE, after=now, seconds=STORMY)
    stage.note(
        more_than_two_looks_after_that=len(passes) > 2,
        published_more_meanwhile=_publishes(stage) - before,
    )
    stage.thaw("worker")
    stage.await_end()
    _end_with_publishes(stage)


def rate_limited(stage: Stage) -> None:
    stage.start()
    _owe(stage, tasks.trickle, times=TRICKLING)
    stage.await_state(State.SUCCEEDED)
    stage.await_taken(TRICKLING - 1)
    now = stage.means.database.now()
    stage.start_only({"second worker": _without_rate(stage)})
    passes = stage.watch(RECONCILE, after=now, seconds=LONG)
    _note_untouched(stage, passes)
    stage.note(
        in_the_queue_meanwhile=stage.means.broker.holds(stage.job().queue)[0],
        still_waiting=stage.count(State.PUBLISHED),
    )
    await_exit = stage.ask_to_end("worker", SIGTERM)
    await_exit()
    stage.await_end()
    _end_with_publishes(stage)


@contextmanager
def _lingering(stage: Stage) -> Iterator[None]:
    """As long as this lasts, `linger` does not end."""
    lingering = stage.fleet.folder / tasks.LINGERING
    lingering.touch()
    try:
        yield
    finally:
        lingering.unlink()


def _owe(stage: Stage, task: OutboxTask, *, times: int) -> None:
    with transaction.atomic():
        for _ in range(times):
            stage.owe(task)


def _without_rate(stage: Stage) -> Env:
    unlimited = {tasks.trickle.name: {"rate_limit": None}}
    return stage.with_settings(CELERY_TASK_ANNOTATIONS=unlimited)


def _publishes(stage: Stage) -> int:
    return sum(job.publishes for job in stage.jobs())


def _note_untouched(stage: Stage, passes: Sequence[Pass]) -> None:
    """Whether reconcile has looked often enough, and how many it took for lost."""
    found = [each.found for each in passes]
    stage.note(
        several_looks=len(passes) > 2,
        missed_by_a_look=sum(each["missing"] for each in found),
        marked_as_missing=sum(job.missing_since is not None for job in stage.jobs()),
        owed_again=sum(each["stranded"] + each["orphaned"] for each in found),
    )


def _end_with_publishes(stage: Stage) -> None:
    """Once all is delivered: how often one was published at most.

    At least never: a worker that is faster than the mark claims it from pending.
    """
    stage.await_drained()
    stage.let_pass()
    stage.note(most_publishes=max(job.publishes for job in stage.jobs()))


_UNTOUCHED = {
    "several_looks": True,
    "missed_by_a_look": 0,
    "marked_as_missing": 0,
    "owed_again": 0,
    "strand_events": 0,
    "most_publishes": 1,
    "discarded": 0,
}

POINTS = (
    Point(
        name="deep-queue-is-not-stranded",
        summary=f"no process dies while {DEEP} jobs wait behind slow ones for thrice the grace",
        expected=(
            "several looks of reconcile see them wait, miss none and publish none again; one "
            "attempt, one delivery and one effect each"
        ),
        play=deep_queue,
        wants=lambda given: own(
            **_UNTOUCHED,
            jobs=SLOW + DEEP,
            effects=SLOW + DEEP,
            keys=SLOW + DEEP,
            deliveries=SLOW + DEEP,
            fewest_seen_waiting=SLOW + DEEP - HELD,
        ),
        risk="none known; a queue that is too deep for its workers is told as over age",
    ),
    Point(
        name="stalled-worker-no-storm",
        summary="SIGSTOP the only worker with eight messages in its hands, and later SIGCONT it",
        expected=(
            "what it holds is published again, once; what waits in the queue is not; no later "
            "look publishes more; one attempt and one effect each, the late copies are discarded"
        ),
        play=stalled_worker,
        wants=lambda given: own(
            jobs=HELD + WAITING,
            effects=HELD + WAITING,
            keys=HELD + WAITING,
            most_publishes=2,
            strand_events=HELD,
            more_than_two_looks_after_that=True,
            published_more_meanwhile=0,
            deliveries=2 * HELD + WAITING,
            discarded=HELD,
        ),
        risk="none known; a copy costs the worker that comes back one look at the row",
    ),
    Point(
        name="rate-limited-is-not-orphaned",
        summary="SIGTERM a worker that has kept three jobs back for their rate limit for long",
        expected=(
            "while it lives, no look of reconcile takes them for lost; then another worker gets "
            "the same messages; published once, one attempt and one effect each"
        ),
        play=rate_limited,
        wants=lambda given: own(
            **_UNTOUCHED,
            killed=[0],
            jobs=TRICKLING,
            effects=TRICKLING,
            keys=TRICKLING,
            in_the_queue_meanwhile=0,
            still_waiting=TRICKLING - 1,
            deliveries=2 * TRICKLING - 1,
        ),
        risk="none known; a worker holds what it took, also where another one could run it at once",
    ),
)

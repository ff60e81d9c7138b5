"""What a point waits for. Every wait is bounded, says what for, and ends with the thing."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from outbox.drill import record
from outbox.drill.broker import Broker
from outbox.drill.database import Database
from outbox.drill.environment import TIMES
from outbox.drill.errors import WaitedInVain
from outbox.drill.fleet import Fleet, Name
from outbox.drill.processes import ProcessError
from outbox.drill.record import Job, Pass
from outbox.drill.subject import Placed, Subject
from outbox.drill.tasks import OWN
from outbox.failpoints import Failpoint
from outbox.states import State
from outbox.ticks import DISPATCH, RECONCILE

POLL_SECONDS = 0.03
PASSES = 2  # of the dispatcher, after which nothing more is to be expected
LOOKS = 3  # of reconcile, after which it has confirmed what it found

T = TypeVar("T")
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Means:
    """What all points share."""

    subject: Subject
    fleet: Fleet
    broker: Broker
    database: Database
    say: Say
    retries: int = 0  # the task's max_retries during the drill
    crashes: int = 0  # at how many the task is given up
    timeout: float = 30  # seconds; the bound on each wait

    @property
    def attempts(self) -> int:
        """How many attempts the task has before it fails for good."""
        return self.retries + 1


class Waits:
    """The waiting half of a stage."""

    def __init__(self, means: Means) -> None:
        self.means, self.fleet, self.subject = means, means.fleet, means.subject
        self.stopped_pid = 0
        self.renewed: bool | None = None
        self.begun: datetime = means.database.now()
        self.expected = 0  # how many jobs there are to be
        self._placing: list[Future[Placed]] = []

    @property
    def tasks(self) -> Collection[str]:
        return (self.subject.task, *OWN)

    def jobs(self) -> tuple[Job, ...]:
        """This point's jobs, oldest first."""
        return record.jobs_since(self.begun, tasks=self.tasks)

    def count(self, *states: State) -> int:
        """How many of this point's jobs are in these states; to read thousands takes long."""
        return record.count(self.begun, tasks=self.tasks, states=states)

    def job(self) -> Job:
        """The oldest of them."""
        return self.jobs()[0]

    def await_stop(self, name: Name, *, at: Failpoint) -> int:
        """Wait until a process stands still at the point: its PID."""
        marker = self.fleet.marker(at)
        what = f"the {name} to reach {at}"

        def standing() -> str:
            self._raise_if_not_placed()
            return marker.read_text() if marker.exists() else ""

        self.stopped_pid = int(self.until(standing, what=what, who=name))
        if not self.fleet.belongs(self.stopped_pid, name):
            raise WaitedInVain(f"{at} was reached by PID {self.stopped_pid}, not by the {name}")
        return self.stopped_pid

    def await_placed(self) -> None:
        """Wait until the web has answered all that it was asked for."""
        self.until(
            lambda: all(placing.done() for placing in self._placing), what="an answer", who="web"
        )
        self._raise_if_not_placed()

    def await_missing(self) -> None:
        """Wait until a first look has missed the messages of all published jobs."""

        def missed() -> bool:
            jobs = [job for job in self.jobs() if job.state == State.PUBLISHED]
            return bool(jobs) and all(job.missing_since for job in jobs)

        self.until(missed, what="its message to be missed", who="dispatcher")

    def await_hanging(self, *, runs: int = 1) -> None:
        """Wait until so many runs are claimed and hang at the destination."""

        def hang() -> bool:
            self._raise_if_not_placed()
            running = sum(job.state == State.RUNNING for job in self.jobs())
            hanging = self.subject.hanging()
            return running >= runs and (hanging is None or hanging >= runs)

        self.until(hang, what=f"{runs} to hang at the destination", who="worker")

    def await_taken(self, messages: int) -> None:
        """Wait until workers hold so many messages."""
        queue = self.job().queue
        self.until(
            lambda: self.means.broker.holds(queue)[1] >= messages,
            what=f"{messages} messages to be taken",
            who="worker",
        )

    def await_drained(self) -> None:
        """Wait until the broker holds no message: whatever was published has been delivered."""
        self.await_holding(waiting=0, taken=0)

    def await_holding(self, *, waiting: int, taken: int) -> None:
        """Wait until so many messages wait in the queue, and workers hold so many."""
        queue = self.job().queue
        self.until(
            lambda: self.means.broker.holds(queue) == (waiting, taken),
            what=f"{waiting} messages to wait and {taken} to be taken",
            who="worker",
        )

    def await_cut(self) -> None:
        """Wait until the destination knows that nobody waits for its answer any more."""
        what = "the destination to see that its client is gone"
        self.until(lambda: not self.subject.hanging(), what=what, who="worker")

    def await_lease_renewal(self) -> None:
        """Look whether the stopped run's lease is renewed, for as long as a renewal may take."""
        self.means.say("watching its lease")
        job = self.job()
        deadline = time.monotonic() + TIMES["LEASE"] / 2
        self.renewed = False
        while not self.renewed and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            self.renewed = self.job().lease_until != job.lease_until

    def await_renewals(self, *, seconds: float) -> None:
        """Wait until the lease of the oldest job reaches so much further than it does now."""
        first = self.job().lease_until

        def renewed() -> bool:
            until = self.job().lease_until
            return bool(first and until and (until - first).total_seconds() > seconds)

        self.until(renewed, what="its lease to be renewed", who="worker")

    def await_state(self, state: State, *, jobs: int = 1) -> None:
        """Wait until so many jobs are in that state."""

        def there() -> bool:
            self._raise_if_not_placed()
            return sum(job.state == state for job in self.jobs()) >= jobs

        self.until(there, what=f"a job to be {state}", who="dispatcher")

    def await_count(self, count: int, state: State) -> None:
        """The same of thousands, which take long to read."""
        what = f"{count} jobs to be {state}"
        self.until(lambda: self.count(state) >= count, what=what, who="dispatcher")

    def await_run(self, number: int) -> None:
        """Wait until the oldest job is in its run of that number."""

        def runs() -> bool:
            job = self.job()
            return job.attempts >= number and job.state == State.RUNNING

        self.until(runs, what=f"run {number} of the job", who="second worker")

    def await_event(self, verb: str, *, who: Name = "worker") -> None:
        """Wait until that verb was recorded of the oldest job."""

        def seen() -> bool:
            self._raise_if_not_placed()
            return any(job.seen(verb) for job in self.jobs()[:1])

        self.until(seen, what=f"the event {verb}", who=who)

    def await_log(self, words: str, *, who: Name, times: int = 1) -> None:
        """Wait until a process has written that, since its latest start."""

        def written() -> bool:
            return self.fleet.tail(who, lines=100_000).count(words) >= times

        self.until(written, what=f"{words!r} in the log", who=who)

    def await_answer(self) -> None:
        """Wait until the web has answered all that it was asked."""

        def answered() -> bool:
            self._raise_if_not_placed()
            return all(asked.done() and asked.result().job_id for asked in self._placing)

        self.until(answered, what="the web to answer", who="web")

    def await_owner_told(self) -> None:
        job_id = self.job().id
        what = "the job's owner to be told"
        self.until(lambda: record.owner_is_told(job_id), what=what, who="worker")

    def await_end(self) -> None:
        """Wait until all jobs have ended or wait for a person, and then for what may follow."""

        def ended() -> bool:
            self._raise_if_not_placed()
            jobs = self.jobs()
            over = all(job.has_ended or job.waits_for_a_person for job in jobs)
            return over and len(jobs) >= self.expected

        self.until(ended, what="the job to reach its end", who="worker")
        self.let_pass()

    def let_pass(self) -> None:
        """Wait for some whole passes of the dispatcher: what is to come has come then."""
        self._await_passes(DISPATCH, PASSES)

    def let_reconcile(self, *, after: datetime) -> None:
        """Wait until reconcile has looked often enough at what was published at that time."""

        def is_past_grace() -> bool:
            return (self.means.database.now() - after).total_seconds() > TIMES["STRAND_GRACE"]

        self.until(is_past_grace, what="reconcile's grace to be over", who="dispatcher")
        self.let_look()

    def let_look(self) -> None:
        """Wait until reconcile has looked often enough to have confirmed what it may find."""
        self._await_passes(RECONCILE, LOOKS)

    def watch(self, tick: str, *, after: datetime, seconds: float) -> list[Pass]:
        """Each pass that began after that time, until one has begun so long after it."""
        passes: list[Pass] = []

        def next_pass() -> Pass | None:
            last = record.latest_pass(tick)
            known = passes[-1].ended if passes else None
            return last if last and last.began > after and last.ended != known else None

        while not passes or (passes[-1].began - after).total_seconds() < seconds:
            what = f"pass {len(passes) + 1} of {tick}"
            passes.append(self.until(next_pass, what=what, who="dispatcher"))  # type: ignore[arg-type]
        return passes

    def _await_passes(self, tick: str, count: int) -> None:
        for _ in range(count):
            before = record.last_pass(tick)
            self.until(
                lambda before=before: record.last_pass(tick) != before,  # type: ignore[misc]
                what=f"a pass of {tick}",
                who="dispatcher",
            )

    def until(self, predicate: Callable[[], T], *, what: str, who: Name) -> T:
        """Ask until the answer is true.

        Raises:
            WaitedInVain: the time is over, or a process died that nobody killed.
        """
        self.means.say(f"waiting for {what}")
        deadline = time.monotonic() + self.means.timeout
        while not (answer := predicate()):
            try:
                self.fleet.check()
            except ProcessError as error:
                raise WaitedInVain(f"{error}\nThis was while waiting for {what}") from error
            if time.monotonic() > deadline:
                tail = self.fleet.tail(who)
                raise WaitedInVain(
                    f"waited {self.means.timeout:g} s in vain for {what}. The end of "
                    f"{self.fleet.log(who)}:\n{tail}"
                )
            time.sleep(POLL_SECONDS)
        return answer

    def _raise_if_not_placed(self) -> None:
        for placing in self._placing:
            if placing.done() and (error := placing.exception()):
                what = f"the {self.subject.business} could not be placed"
                raise WaitedInVain(f"{what}: {type(error).__name__}: {error}") from error

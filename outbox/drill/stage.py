"""One point's stage: what is started, placed, stopped, killed and waited for, step by step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar, cast
from uuid import UUID

import redis

from outbox.drill import record, witness
from outbox.drill.environment import TIMES
from outbox.drill.errors import WaitedInVain
from outbox.drill.facts import Facts
from outbox.drill.fleet import Death, Fleet, Name
from outbox.drill.processes import ProcessError
from outbox.drill.record import Job
from outbox.drill.subject import Placed, Subject
from outbox.failpoints import Failpoint
from outbox.states import State

POLL_SECONDS = 0.03
PASSES = 2  # of the dispatcher, after which nothing more is to be expected

T = TypeVar("T")
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Means:
    """What all points share."""

    subject: Subject
    fleet: Fleet
    broker_url: str
    say: Say
    retries: int = 0  # the task's max_retries during the drill
    timeout: float = 30  # seconds; the bound on each wait

    @property
    def attempts(self) -> int:
        """How many attempts the task has before it fails for good."""
        return self.retries + 1


class Stage:
    """Plays one point. Every wait is bounded and says what it waits for."""

    def __init__(self, means: Means) -> None:
        self.means, self.fleet, self.subject = means, means.fleet, means.subject
        self.deaths: list[Death] = []
        self.renewed: bool | None = None
        self.stopped_pid: int | None = None
        self._known = record.job_ids(self.subject.task)
        self._placing: Future[Placed] | None = None
        record.cancel_open_jobs()
        with redis.Redis.from_url(means.broker_url) as client:
            client.flushdb()

    # --- steps --------------------------------------------------------------------------------

    def start(self, **special: Mapping[str, str]) -> None:
        """Have web, dispatcher and worker run, the named ones with this environment on top."""
        self.start_only(**({"web": {}, "dispatcher": {}, "worker": {}} | special))

    def start_only(self, **wanted: Mapping[str, str]) -> None:
        """Have these run, each with this environment on top."""
        self.means.say("starting what this point needs")
        self.fleet.ensure({cast(Name, name): env for name, env in wanted.items()})

    def place(self) -> None:
        """Ask for one obligation, in a thread: the web may be about to die."""
        self.means.say(f"placing one {self.subject.business}")
        placing: Future[Placed] = Future()
        url = self.fleet.base_url

        def ask() -> None:
            try:
                placing.set_result(self.subject.place(url))
            except Exception as error:
                placing.set_exception(error)

        self._placing = placing
        threading.Thread(target=ask, daemon=True, name="placing").start()

    def await_stop(self, name: Name, *, at: Failpoint) -> None:
        """Wait until the process stands still at the point."""
        marker = self.fleet.marker(at)
        what = f"the {name} to reach {at}"

        def standing() -> str:
            self._raise_if_not_placed()
            return marker.read_text() if marker.exists() else ""

        self.stopped_pid = int(self.until(standing, what=what, who=name))
        if not self.fleet.belongs(self.stopped_pid, name):
            raise WaitedInVain(f"{at} was reached by PID {self.stopped_pid}, not by the {name}")

    def kill(self, name: Name) -> None:
        """SIGKILL it where it stands."""
        self.means.say(f"sending SIGKILL to the {name}")
        self.deaths.append(self.fleet.kill(name))

    def await_lease_renewal(self) -> None:
        """Look whether the stopped run's lease is renewed, for as long as a renewal may take."""
        self.means.say("watching its lease")
        (job,) = self.jobs()
        deadline = time.monotonic() + TIMES["LEASE"] / 2
        self.renewed = False
        while not self.renewed and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            self.renewed = self.jobs()[0].lease_until != job.lease_until

    def await_published(self) -> None:
        def published() -> bool:
            return any(job.state == State.PUBLISHED for job in self.jobs())

        self.until(published, what="the job to be published and marked", who="dispatcher")

    def await_discard(self) -> None:
        self.until(
            lambda: self._discarded(self._job_id()),
            what="the second delivery to be discarded",
            who="worker",
        )

    def await_owner_told(self) -> None:
        job_id = self._job_id()
        what = "the job's owner to be told"
        self.until(lambda: record.owner_is_told(job_id), what=what, who="worker")

    def await_end(self) -> None:
        """Wait until the job has ended or waits for a person, and then for what may follow."""

        def ended() -> bool:
            self._raise_if_not_placed()
            jobs = self.jobs()
            return bool(jobs) and all(job.has_ended or job.waits_for_a_person for job in jobs)

        self.until(ended, what="the job to reach its end", who="worker")
        self.let_pass()

    def let_pass(self) -> None:
        """Wait for some whole passes of the dispatcher: what is to come has come then."""
        for _ in range(PASSES):
            before = record.last_dispatch()
            self.until(
                lambda before=before: record.last_dispatch() != before,  # type: ignore[misc]
                what="the dispatcher to make a pass",
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

    # --- looks --------------------------------------------------------------------------------

    def jobs(self) -> tuple[Job, ...]:
        return record.jobs_since(self._known, task=self.subject.task)

    def facts(self) -> Facts:
        """All that can be seen of the point now."""
        placed = self._placed()
        jobs = self.jobs()
        job_id = jobs[0].id if jobs else placed and placed.job_id
        journal = self.fleet.folder / "journal"
        return Facts(
            placed=placed,
            jobs=jobs,
            effects=tuple(self.subject.effects(placed)) if placed else (),
            deliveries=witness.count(journal, witness.RECEIVED, job_id=job_id) if job_id else 0,
            discarded=self._discarded(job_id) if job_id else 0,
            signals=witness.count(journal, witness.FAILED, job_id=job_id) if job_id else 0,
            owner_mails=self.subject.owner_mails(job_id) if job_id else 0,
            deaths=tuple(self.deaths),
            renewed=self.renewed,
        )

    def _placed(self) -> Placed | None:
        """As committed in the database, under the reference that was chosen."""
        if self._placing is None:
            return None
        try:
            placed = self._placing.result(self.means.timeout)
        except Exception:
            return None
        return self.subject.find(placed)

    def _raise_if_not_placed(self) -> None:
        if self._placing and self._placing.done() and (error := self._placing.exception()):
            what = f"the {self.subject.business} could not be placed"
            raise WaitedInVain(f"{what}: {type(error).__name__}: {error}") from error

    def _job_id(self) -> UUID:
        return self.jobs()[0].id

    def _discarded(self, job_id: UUID) -> int:
        log = self.fleet.log("worker")
        text = log.read_text(errors="replace") if log.exists() else ""
        return text.count(f"outbox.delivery.discarded entry_id={job_id}")

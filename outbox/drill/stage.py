"""One point's stage: what is started, placed, stopped, killed and waited for, step by step."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from signal import Signals
from typing import Any
from uuid import UUID

from celery import chain
from django.db import transaction

import outbox
from outbox.drill import own_effects, people, record, results, witness
from outbox.drill.environment import OVERRIDES
from outbox.drill.errors import WaitedInVain
from outbox.drill.facts import Facts, Obligation
from outbox.drill.fleet import WORKERS, Death, Env, Name
from outbox.drill.people import ACTOR
from outbox.drill.processes import Process, ProcessError
from outbox.drill.record import Job
from outbox.drill.subject import Effect, Mode, Placed, kinds_of, requests_of
from outbox.drill.waits import Means, Say, Waits
from outbox.failpoints import Failpoint
from outbox.models import OutboxQueue
from outbox.states import Verb
from outbox.tasks import OutboxTask

__all__ = ["Means", "Say", "Stage"]

_DISCARDED = re.compile(r"outbox\.delivery\.discarded entry_id=(\S+)").findall
NOBODY: Mapping[Name, Env] = {}


class Stage(Waits):
    """Plays one point."""

    def __init__(self, means: Means) -> None:
        means.fleet.reset()
        means.subject.destination("ok")
        super().__init__(means)
        self.deaths: list[Death] = []
        self.struck_at: float | None = None
        self.notes: dict[str, Any] = {}
        record.cancel_open_jobs()
        means.broker.wipe()

    # --- starting and owing -------------------------------------------------------------------

    def start(self, special: Mapping[Name, Env] = NOBODY) -> None:
        """Have web, dispatcher and worker run, and those named with this environment on top."""
        self.start_only({"web": {}, "dispatcher": {}, "worker": {}, **special})

    def start_without_worker(self, special: Mapping[Name, Env] = NOBODY) -> None:
        """As `start`, but nobody takes what is published."""
        self.fleet.stop("worker")
        self.start_only({"web": {}, "dispatcher": {}, **special})

    def start_without_dispatcher(self, special: Mapping[Name, Env] = NOBODY) -> None:
        """As `start`, but nobody dispatches or reconciles, unless it is named."""
        self.fleet.stop("dispatcher")
        self.start_only({"web": {}, "worker": {}, **special})

    def start_only(self, wanted: Mapping[Name, Env]) -> None:
        """Have these run, each with this environment on top."""
        self.means.say("starting what this point needs")
        self.fleet.ensure(wanted)

    def with_settings(self, **settings: Any) -> Env:
        """The environment of a process with these Django settings on top of the subject's.

        Dicts are merged.
        """
        given = dict(self.subject.settings)
        for name, value in settings.items():
            mine = given.get(name)
            given[name] = {**mine, **value} if isinstance(mine, dict) else value
        return {OVERRIDES: json.dumps(given)}

    def sent_as(self, kind: str) -> Env:
        """The environment of a process whose destination is of that kind."""
        return self.with_settings(**kinds_of(self.subject)[kind])

    def stop_at(self, *points: Failpoint, armed: bool = True) -> Env:
        return self.fleet.stop_at(*points, armed=armed)

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

        self.expected += 1
        self._placing.append(placing)
        threading.Thread(target=ask, daemon=True, name="placing").start()

    def owe(self, task: OutboxTask, *args: Any, **options: Any) -> None:
        """Enqueue a task of the drill's own, from this process, which publishes it as well."""
        self.expected += 1
        task.apply_async(args, **options)

    def owe_many(self, task: OutboxTask, count: int, **options: Any) -> None:
        """The same, so many times in one transaction."""
        self.expected += count
        with transaction.atomic():
            for _ in range(count):
                task.apply_async((), **options)

    def owe_chain(self, *steps: OutboxTask) -> None:
        """Enqueue a chain of tasks of the drill's own: each but the first by the one before."""
        self.expected += len(steps)
        chain(*(step.si() for step in steps)).apply_async()

    # --- blows --------------------------------------------------------------------------------

    def kill(self, name: Name) -> None:
        """SIGKILL it where it stands."""
        self.means.say(f"sending SIGKILL to the {name}")
        self._note_death(self.fleet.kill(name))

    def kill_child(self, pid: int, *, rearm: Failpoint | None = None) -> None:
        """SIGKILL one child of the worker, and note how its crash is counted afterwards."""
        self.means.say(f"sending SIGKILL to the worker's child {pid}")
        self._note_death(self.fleet.kill_child("worker", pid, rearm=rearm))

    def freeze(self, name: Name) -> None:
        self.means.say(f"sending SIGSTOP to the {name} and its children")
        self.fleet.freeze(name)
        self.strike()

    def thaw(self, name: Name) -> None:
        self.means.say(f"sending SIGCONT to the {name} and its children")
        self.fleet.thaw(name)

    def ask_to_end(
        self, name: Name, number: Signals, *, then: tuple[Signals, str] | None = None
    ) -> Callable[[], None]:
        """Send it, and another signal once its log says that. What this gives awaits its exit."""
        self.means.say(f"sending {number.name} to the {name}")
        self.strike()
        at = time.time()
        process = self.fleet.ask_to_end(name, number)
        if then:
            second, words = then
            self.until(lambda: words in process.tail(200), what=f"{words!r}", who=name)
            self.means.say(f"sending {second.name} to the {name}")
            process.signal(second)
        return lambda: self._await_exit(process, name=name, at=at)

    @contextmanager
    def paused(self, queue: str) -> Iterator[None]:
        """Let nothing be published to that queue, as a person may."""
        self.means.say(f"pausing the queue {queue}")
        row, _ = OutboxQueue.objects.update_or_create(name=queue, defaults={"paused": True})
        try:
            yield
        finally:
            row.delete()

    def strike(self) -> None:
        """The time to recover runs from here."""
        self.struck_at = time.time()

    def note(self, **seen: Any) -> None:
        """What this point alone looks at; underscores become spaces in the report."""
        self.notes |= {name.replace("_", " "): value for name, value in seen.items()}

    @contextmanager
    def hanging_destination(self) -> Iterator[Callable[[Mode], None]]:
        """Let every attempt hang, until what this gives is told how they are answered."""
        self.subject.destination("hang")
        try:
            yield self.subject.destination
        finally:
            self.subject.destination("ok")

    def cancel(self, *, terminate: bool = False) -> None:
        """Cancel the oldest job, as its owner would."""
        self.means.say("cancelling the job")
        outbox.cancel(self.job().id, actor=ACTOR, terminate=terminate)

    def resolve(self, *, effect: str, happened: bool) -> None:
        """Say what became of the oldest job's effect, as a person does who has looked."""
        self.means.say(f"saying of {effect} that it {'happened' if happened else 'did not happen'}")
        if not outbox.resolve(self.job().id, effect=effect, happened=happened, actor=ACTOR):
            raise WaitedInVain(f"nobody is asked about {effect}")

    def requeue(self) -> bool:
        return outbox.requeue(self.job().id, actor=ACTOR)

    def await_settled(self) -> None:
        """Wait until a cancelled job's run is over; note who saw that, and let follow what may."""
        self.until(
            lambda: self.job().lease_until is None, what="the run to be settled", who="worker"
        )
        self.let_pass()
        self.note(settled_by=[event.actor for event in self.job().seen(Verb.SETTLE)])

    def let_go(self, point: Failpoint) -> None:
        """Who stands at the point goes on, and nobody stops there any more."""
        self.means.say(f"letting go at {point}")
        self.fleet.let_go(point)

    def _note_death(self, death: Death) -> None:
        self.deaths.append(death)
        self.struck_at = death.at

    def _await_exit(self, process: Process, *, name: Name, at: float) -> None:
        self.means.say(f"waiting for the {name} to end")
        try:
            self.deaths.append(self.fleet.await_exit(process, name=name, at=at))
        except ProcessError as error:
            raise WaitedInVain(str(error)) from error

    # --- looks --------------------------------------------------------------------------------

    def facts(self) -> Facts:
        """All that can be seen of the point now."""
        obligations = self._obligations()
        ids = [each.job.id for each in obligations if each.job]
        mails = [self.subject.owner_mails(job_id) for job_id in ids]
        noted = witness.count(self.fleet.folder / "journal", job_ids=ids)
        return Facts(
            obligations=obligations,
            deliveries=noted[witness.RECEIVED],
            discarded=self.discarded(*ids),
            signals=noted[witness.FAILED],
            owner_mails=None if None in mails else sum(mail or 0 for mail in mails),
            deaths=tuple(self.deaths),
            renewed=self.renewed,
            struck_at=self.struck_at,
            stored_failures=results.stored_failures(ids),
            stored_early=results.stored_early(ids),
            notes=dict(self.notes),
        )

    def unsettled(self) -> list[str]:
        """The effects of the oldest job whose outcome nobody knows."""
        return record.begun_effects(self.job().id)

    def requests(self) -> int | None:
        """How often the destination was asked for what was placed, whatever it made of that."""
        (placed,) = [each.placed for each in self._obligations() if each.placed]
        return requests_of(self.subject, placed)

    def messages(self) -> Mapping[str, int]:
        """What was owed to owners, and what of it was told."""
        mails = [self.subject.owner_mails(job.id) or 0 for job in self.jobs()]
        return {**record.told_since(self.begun, tasks=self.tasks), "mails": max(mails)}

    def status(self, env: Env) -> Mapping[str, Any]:
        """What `outbox_status` tells a person now."""
        return people.status({**self.fleet.env, **env})

    def discarded(self, *job_ids: UUID) -> int:
        """How many deliveries of the jobs ran nothing, by what the workers say."""
        ids = set(map(str, job_ids))
        return sum(found in ids for text in self._worker_logs() for found in _DISCARDED(text))

    def await_discard(self, *job_ids: UUID, times: int = 1) -> None:
        """Wait until so many deliveries of these, or of the oldest job, ran nothing."""
        ids = job_ids or (self.job().id,)
        what = "a delivery to be discarded"
        self.until(lambda: self.discarded(*ids) >= times, what=what, who="worker")

    def _worker_logs(self) -> Iterator[str]:
        for log in map(self.fleet.log, WORKERS):
            if log.exists():
                yield log.read_text(errors="replace")

    def _obligations(self) -> tuple[Obligation, ...]:
        placed = [found for found in map(self._committed, self._placing) if found]
        by_job = {each.job_id: each for each in placed if each.job_id}
        own = own_effects.of([job.id for job in self.jobs()])
        found = [self._obligation(job, by_job.pop(job.id, None), own) for job in self.jobs()]
        without = [each for each in placed if not each.job_id or each.job_id in by_job]
        return (*found, *(self._without_job(each) for each in without))

    def _obligation(
        self, job: Job, placed: Placed | None, own: Mapping[UUID, list[Effect]]
    ) -> Obligation:
        effects = self.subject.effects(placed) if placed else own.get(job.id, [])
        return Obligation(placed=placed, job=job, effects=tuple(effects))

    def _without_job(self, placed: Placed) -> Obligation:
        return Obligation(placed=placed, effects=tuple(self.subject.effects(placed)))

    def _committed(self, placing: Future[Placed]) -> Placed | None:
        """As it is in the database, under the reference that was chosen."""
        try:
            placed = placing.result(self.means.timeout)
        except Exception:
            return None
        return self.subject.find(placed)

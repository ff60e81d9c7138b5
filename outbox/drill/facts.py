"""What was seen at a point, and what it amounts to: lost, duplicates, time to recover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from signal import SIGKILL
from typing import Any

from outbox.drill.fleet import Death
from outbox.drill.record import Job
from outbox.drill.subject import Effect, Placed
from outbox.events import LATE
from outbox.states import State, Verb


@dataclass(frozen=True, kw_only=True)
class Obligation:
    """Record and effects of one job.

    `placed` is as committed, None for a job of the drill's own; `job` is None where no row is.
    """

    placed: Placed | None = None
    job: Job | None = None
    effects: tuple[Effect, ...] = ()

    @property
    def has_business(self) -> bool:
        return bool(self.placed and self.placed.business_id)

    @property
    def is_lost(self) -> bool:
        """Without an end that nobody will decide, or without its effect."""
        if self.job is None:
            return self.has_business and not self.effects
        if self.job.waits_for_a_person:
            return False
        return not self.job.has_ended or (self.job.state == State.SUCCEEDED and not self.effects)

    @property
    def duplicates(self) -> int:
        """Effects beyond those that are owed; all of them where nothing is."""
        return max(0, len(self.effects) - self._owed)

    @property
    def _owed(self) -> int:
        """One; of a job whose ledger has several effects, each."""
        if self.job is None:
            return int(self.has_business)
        own = {key for key in self.keys if key.startswith(f"{self.job.id}:")}
        return max(1, len(own))

    @property
    def keys(self) -> set[str]:
        return {effect.key for effect in self.effects}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one point left: its obligations, and what was counted on the way."""

    obligations: tuple[Obligation, ...]
    deliveries: int
    discarded: int
    signals: int
    owner_mails: int | None
    deaths: tuple[Death, ...]
    renewed: bool | None  # None: it was not watched
    struck_at: float | None = None  # wall clock: the last thing that was done to it
    stored_failures: int | None = None  # what Celery's result store calls a FAILURE
    stored_early: int | None = None  # final states that it was told of an open job
    notes: Mapping[str, Any] = field(default_factory=dict)  # what this point alone looks at

    @property
    def jobs(self) -> tuple[Job, ...]:
        return tuple(each.job for each in self.obligations if each.job is not None)

    @property
    def effects(self) -> tuple[Effect, ...]:
        return tuple(effect for each in self.obligations for effect in each.effects)

    @property
    def business(self) -> int:
        return sum(each.has_business for each in self.obligations)

    @property
    def owed(self) -> int:
        """Obligations: the jobs; where a committed row has none, one all the same."""
        return sum(each.has_business or each.job is not None for each in self.obligations)

    @property
    def lost(self) -> int:
        return sum(each.is_lost for each in self.obligations)

    @property
    def duplicates(self) -> int:
        return sum(each.duplicates for each in self.obligations)

    @property
    def recovery_seconds(self) -> float | None:
        """From the last blow to the first effect after it, or else to the first end after it."""
        if self.struck_at is None:
            return None
        ends = [job.finished_at for job in self.jobs if job.finished_at]
        for moments in ([effect.at for effect in self.effects], ends):
            after = [at.timestamp() for at in moments if at.timestamp() > self.struck_at]
            if after:
                return round(min(after) - self.struck_at, 2)
        return None

    @property
    def seconds_open(self) -> float | None:
        """How long the oldest job was owed, from its due time to its end."""
        spans = [job.finished_at - job.due_at for job in self.jobs if job.finished_at]
        return round(max(spans).total_seconds(), 2) if spans else None

    def values(self) -> Mapping[str, Any]:
        """What expectations are compared with, by the name that a report uses.

        A counter that all jobs share is one number, otherwise a list in the order of the jobs.
        """
        jobs = self.jobs
        events = [event for job in jobs for event in job.events]
        verbs = [event.verb for event in events]
        return {
            "killed": [death.returncode for death in self.deaths],
            "business": self.business,
            "jobs": len(jobs),
            "state": _alike([job.state for job in jobs]),
            "attempts": _alike([job.attempts for job in jobs]),
            "failures": _alike([job.failures for job in jobs]),
            "crashes": _alike([job.crashes for job in jobs]),
            "releases": _alike([job.releases for job in jobs]),
            "leases held": sum(job.lease_until is not None for job in jobs),
            "tracebacks": sum(bool(event.traceback) for event in events),
            "error kept": bool(jobs) and all(job.error for job in jobs if job.state == "failed"),
            "deliveries": self.deliveries,
            "discarded": self.discarded,
            "effects": len(self.effects),
            "keys": len({effect.key for effect in self.effects}),
            "signals": self.signals,
            "owner mails": self.owner_mails,
            "stored as FAILURE": self.stored_failures,
            "stored before its end": self.stored_early,
            **{f"{verb} events": verbs.count(verb) for verb in (*Verb, LATE)},
            **self.notes,
        }


def _alike(values: Sequence[Any]) -> Any:
    return values[0] if len(set(values)) == 1 else list(values) or None


KILLED = [-int(SIGKILL)]

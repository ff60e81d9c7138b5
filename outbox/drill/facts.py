"""What was seen at a point, and what it amounts to: lost, duplicates, time to recover."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from signal import SIGKILL
from typing import Any

from outbox.drill.fleet import Death
from outbox.drill.record import Job
from outbox.drill.subject import Effect, Placed
from outbox.states import State


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Record and effect of one point. `placed` is as committed; None where nothing was asked."""

    placed: Placed | None
    jobs: tuple[Job, ...]
    effects: tuple[Effect, ...]
    deliveries: int
    discarded: int
    signals: int
    owner_mails: int | None
    deaths: tuple[Death, ...]
    renewed: bool | None  # None: it was not watched

    @property
    def business(self) -> int:
        return int(bool(self.placed and self.placed.business_id))

    @property
    def owed(self) -> int:
        """Obligations: the jobs; where a committed row has none, one all the same."""
        return max(len(self.jobs), self.business)

    @property
    def lost(self) -> int:
        """Obligations without an end that nobody will decide, or without their effect."""
        missing = sum(map(self._is_lost, self.jobs))
        orphaned = self.business and not self.jobs and not self.effects
        return missing + int(bool(orphaned))

    @property
    def duplicates(self) -> int:
        """Effects beyond one per obligation."""
        return max(0, len(self.effects) - self.owed)

    @property
    def recovery_seconds(self) -> float | None:
        """From the last SIGKILL to the first effect after it, or else to the job's end."""
        if not self.deaths or not self.jobs:
            return None
        killed = self.deaths[-1].at
        ends = [job.finished_at.timestamp() for job in self.jobs if job.finished_at]
        after = [effect.at.timestamp() for effect in self.effects if effect.at.timestamp() > killed]
        moments = after or ends
        return round(max(0.0, min(moments) - killed), 2) if moments else None

    @property
    def seconds_open(self) -> float | None:
        """How long the oldest job was owed, from its due time to its end."""
        spans = [job.finished_at - job.due_at for job in self.jobs if job.finished_at]
        return round(max(spans).total_seconds(), 2) if spans else None

    def values(self) -> Mapping[str, Any]:
        """What expectations are compared with, by the name that a report uses."""
        job = self.jobs[0] if self.jobs else None
        return {
            "killed": [death.returncode for death in self.deaths],
            "business": self.business,
            "jobs": len(self.jobs),
            "state": job and job.state,
            "attempts": job and job.attempts,
            "failures": job and job.failures,
            "crashes": job and job.crashes,
            "tracebacks": sum(bool(event.traceback) for event in job.events) if job else 0,
            "error kept": bool(job and job.error),
            "deliveries": self.deliveries,
            "discarded": self.discarded,
            "effects": len(self.effects),
            "keys": len({effect.key for effect in self.effects}),
            "signals": self.signals,
            "owner mails": self.owner_mails,
        }

    def _is_lost(self, job: Job) -> bool:
        if job.waits_for_a_person:
            return False
        return not job.has_ended or (job.state == State.SUCCEEDED and not self.effects)


KILLED = [-int(SIGKILL)]

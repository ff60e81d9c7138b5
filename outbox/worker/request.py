"""Celery's view of one delivery in the main process: it tells the register of runs.

What a child's death means is the clerk's to say, by the row. So nothing is stored here: Celery
would write FAILURE for an entry that will run again.
"""

from __future__ import annotations

import os
from typing import Any

from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery.exceptions import Ignore
from celery.utils.log import get_logger
from celery.worker.request import Request
from celery.worker.state import task_ready
from kombu.utils.objects import cached_property

from outbox.clock import as_uuid
from outbox.conf import default_database, settings
from outbox.lifecycle.claim import Discard
from outbox.lifecycle.finish import usual_pause
from outbox.lifecycle.publish import DATABASE_HEADER
from outbox.worker import counts, pools
from outbox.worker.runs import CalledOff, Run, TimedOut, received, runs

logger = get_logger(__name__)

_DEATHS = (WorkerLostError, TimeLimitExceeded)


class OutboxRequest(Request):
    """The request of a durable task."""

    run: Run | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        received.add(self)

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        entry_id = as_uuid(self.id)
        using = self.request_dict.get(DATABASE_HEADER) or default_database()
        # Whoever can write to the broker can write headers: only what can be an entry is a run.
        if self.task.is_durable and entry_id is not None and using in settings().DATABASES:
            # Only prefork's PIDs are processes: gevent gives a greenlet's number.
            process = pid if self._in_a_child(pid) else os.getpid()
            self.run = Run(entry_id, process, using)
            runs.begin(self.run)
        super().on_accepted(pid, time_accepted)

    @cached_property
    def _context(self) -> Any:
        """An entry's errbacks are owed by its ending: this process, too, calls none."""
        context = super()._context
        if self.task.is_durable:
            context.errbacks = None
        return context

    def revoked(self) -> bool:
        """Celery remembers revoked IDs for hours, which would eat a later requeue: the row says."""
        return super().revoked() if not self.task.is_durable else False

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """By Celery's `revoke`: the clerk cancels the entry, and ends its run (worker/control)."""
        if not self.task.is_durable:
            super().terminate(pool, signal=signal)

    def acknowledge(self) -> None:
        self._end()
        super().acknowledge()

    def reject(self, requeue: bool = False) -> None:
        self._end()
        super().reject(requeue=requeue)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        if soft or self.run is None or not self._in_a_child(self.run.pid):
            super().on_timeout(soft, timeout)
            return
        task_ready(self)
        logger.error("Hard time limit (%ss) exceeded for %s[%s]", timeout, self.name, self.id)
        # Its child is still alive: the verdict counts when it is gone, and the run ends then.
        runs.judge(self.run, self._verdict(timeout))
        super().acknowledge()

    def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:
        """The worker calls it off: at a cold shutdown, or since it has lost its broker."""
        if self.run is None:
            super().cancel(pool, signal=signal, emit_retry=emit_retry)
        elif pools.kind() is not pools.Kind.INLINE:  # nothing can end those: they finish
            runs.judge(self.run, CalledOff())
            # No retry is told: the row says what follows, and it is none.
            super().cancel(pool, signal=signal, emit_retry=False)

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> None:
        error = _plain(exc_info)
        if isinstance(error, Ignore):
            _count(error)
        if self.run is None or not isinstance(error, _DEATHS):
            super().on_failure(exc_info, send_failed_event, return_ok)
            return
        task_ready(self)
        if self._already_cancelled:
            return  # unacknowledged: it goes back to the queue when the worker closes
        logger.error("The child that ran %s[%s] is gone: %s", self.name, self.id, exc_info)
        super().acknowledge()  # the register keeps the run until the clerk has seen to it

    def _end(self) -> None:
        received.discard(self)
        # A run whose child is about to die stays registered: the clerk ends it, by the row.
        if self.run is None:
            return
        if runs.verdict(self.run) is None or not self._in_a_child(self.run.pid):
            runs.end(self.run)

    def _verdict(self, limit: float) -> TimedOut:
        task = self.task
        given = self.request_dict.get("retries")
        retries = given if isinstance(given, int) else 0  # whoever sends may write anything
        budget = None if task.max_retries is None else task.max_retries + 1
        return TimedOut(limit=limit, delay=usual_pause(task, retries), budget=budget)

    def _in_a_child(self, pid: int) -> bool:
        return pid != os.getpid() and pools.kind() is pools.Kind.CHILDREN


def _plain(exc_info: Any) -> Any:
    error = exc_info.exception
    return getattr(error, "exc", error)


def _count(ignored: Ignore) -> None:
    """A delivery that ran nothing: its tracer has said why."""
    if str(ignored) in set(Discard):
        counts.add(str(ignored))

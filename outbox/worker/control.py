"""Remote control: end one child's run, and let Celery's `revoke` cancel entries.

Both run in the event loop of the worker's main process. A child is killed there and nowhere
else: as long as the loop has not taken in a run's result, its child has been given no other.
"""

from __future__ import annotations

import logging
import os
import signal
from collections import deque
from typing import Any
from uuid import UUID

from celery.utils.functional import maybe_list
from celery.worker.control import Panel, control_command, nok, ok
from celery.worker.state import active_requests
from django.db.models import Q

from outbox import transitions
from outbox.clock import as_uuid
from outbox.conf import settings
from outbox.lifecycle.cancel import TERMINATE, cancel
from outbox.models import OutboxEntry
from outbox.worker import identity, inbox, pools
from outbox.worker.runs import Run, runs

logger = logging.getLogger("outbox")

PIECE = 50  # entries that are cancelled in one look

_CELERYS = dict(Panel.data)  # as they were, before this module takes three of them over


@control_command(name=TERMINATE, visible=False)
def terminate(state: Any, entry_id: str, owner: str, pid: int, **_: Any) -> Any:
    """Kill the child that runs this entry, if it is this worker's and still runs it."""
    found = [run for run in runs.alive() if str(run.entry_id) == entry_id and run.pid == pid]
    if owner != str(identity.BOOT) or not found:
        return nok("it does not run here")
    return _end(found[0], pool=state.consumer.pool)


def _end(run: Run, *, pool: Any) -> Any:
    logger.warning("outbox.run.terminated entry_id=%s pid=%s", run.entry_id, run.pid)
    if pools.kind() is pools.Kind.CHILDREN and run.pid != os.getpid():
        os.kill(run.pid, signal.SIGKILL)
        return ok(f"killed {run.pid}")
    if pools.kind() is pools.Kind.GREEN:
        for request in list(active_requests):
            if request.id == str(run.entry_id):
                pool.terminate_job(request.worker_pid)
        return ok("ended its greenlet")
    return nok("this pool cannot end a job: its end will be discarded")


@control_command(
    name="revoke", variadic="task_id", signature="[id1 [id2 [... [idN]]]]",
)  # fmt: skip
def revoke(state: Any, task_id: Any, terminate: bool = False, **kwargs: Any) -> Any:
    """Revoke task by task id (or list of ids). Entries of the outbox are cancelled."""
    ids = [found for given in maybe_list(task_id) or () if (found := as_uuid(given)) is not None]
    _cancel_everywhere(Q(pk__in=ids), terminate=terminate)
    return _CELERYS["revoke"](state, task_id, terminate=terminate, **kwargs)


@control_command(
    name="terminate", variadic="task_id", signature="<signal> [id1 [id2 [... [idN]]]]",
    args=[("signal", str)],
)  # fmt: skip
def revoke_and_terminate(state: Any, signal: Any, task_id: Any, **kwargs: Any) -> Any:
    """Terminate task by task id (or list of ids). Entries of the outbox are cancelled."""
    return revoke(state, task_id, terminate=True, signal=signal, **kwargs)


@control_command(
    name="revoke_by_stamped_headers", variadic="headers",
    signature="[key1=value1 [key2=value2 [... [keyN=valueN]]]]",
)  # fmt: skip
def revoke_stamped(state: Any, headers: Any, terminate: bool = False, **kwargs: Any) -> Any:
    """Revoke task by header (or list of headers). Entries of the outbox are cancelled."""
    if isinstance(headers, list):
        headers = dict(pair.split("=", 1) for pair in headers)
    stamped = Q(pk__in=[])
    for name, values in headers.items():
        for value in maybe_list(values):
            stamped |= Q(options__contains={"stamps": {name: value}})
            stamped |= Q(options__contains={"stamps": {name: [value]}})
    _cancel_everywhere(stamped, terminate=terminate)
    return _CELERYS["revoke_by_stamped_headers"](state, headers, terminate=terminate, **kwargs)


def _cancel_everywhere(which: Q, *, terminate: bool) -> None:
    for using in settings().DATABASES:
        inbox.put(_Cancelling(which, terminate=bool(terminate), using=using))


class _Cancelling:
    """Every worker hears of a revocation; the first one cancels. A piece at each look."""

    def __init__(self, which: Q, *, terminate: bool, using: str) -> None:
        self.which, self.terminate, self.using = which, terminate, using
        self.left: deque[UUID] | None = None

    def __call__(self) -> bool:
        if self.left is None:
            rows = OutboxEntry.objects.using(self.using).filter(self.which)
            found = rows.unfinished() | rows.filter(lease_owner__isnull=False)
            self.left = deque(found.values_list("pk", flat=True))
        for _ in range(min(PIECE, len(self.left))):
            self._cancel(self.left[0])
            self.left.popleft()
        return not self.left

    def _cancel(self, entry_id: UUID) -> None:
        with transitions.short_of_patience(using=self.using):
            cancel(
                entry_id,
                actor="celery:revoke",
                reason="revoked through Celery's remote control",
                terminate=self.terminate,
                using=self.using,
            )

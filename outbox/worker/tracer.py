"""Around Celery's tracer: the claim comes before `task_prerun`, the check of the end after it.

A lost claim *returns* what an ignored task returns. Raising here would leave the message unacked
in the threads pool and end a solo worker (docs/explanation/worker.md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from billiard.einfo import ExceptionInfo
from celery.app.trace import TraceInfo, trace_ok_t
from celery.exceptions import Ignore, Reject, WorkerShutdown
from celery.states import IGNORED, REJECTED

from outbox.clock import as_uuid
from outbox.conf import default_database, settings
from outbox.failpoints import Failpoint, reach
from outbox.lifecycle import run
from outbox.lifecycle.claim import Claim, Discard, take
from outbox.lifecycle.publish import DATABASE_HEADER
from outbox.outage import is_outage
from outbox.worker import soft_limit
from outbox.worker.stopping import is_ending, is_stopping

if TYPE_CHECKING:
    from outbox.tasks import OutboxTask

logger = logging.getLogger("outbox")

Tracer = Callable[..., Any]


def wrap(task: OutboxTask, tracer: Tracer) -> Tracer:
    """A tracer that runs `task` only under a claim, with what the row says."""

    def trace(uuid: str, args: Any, kwargs: Any, request: Any = None) -> Any:
        if not task.is_durable:
            return tracer(uuid, args, kwargs, request)
        with soft_limit.kept_out():
            return _deliver(task, tracer, uuid, args, kwargs, request or {})

    return trace


def _deliver(
    task: OutboxTask, tracer: Tracer, uuid: str, args: Any, kwargs: Any, request: dict[str, Any]
) -> Any:
    if is_ending():
        return _given_back(WorkerShutdown(0))
    try:
        found = _take(task, uuid, args, kwargs, request)
    except Exception as error:
        return _unclaimed(task, uuid, error)
    if isinstance(found, Discard):
        return _returned(Ignore(found.value), IGNORED)
    return _trace(task, tracer, found, request)


def _take(
    task: OutboxTask, uuid: str, args: Any, kwargs: Any, request: Mapping[str, Any]
) -> Claim | Discard:
    using = request.get(DATABASE_HEADER) or default_database()
    entry_id = as_uuid(uuid)
    found: Claim | Discard = Discard.UNKNOWN
    if entry_id is not None and using in settings().DATABASES:
        reach(Failpoint.DELIVERED)
        found = take(task, entry_id, args, kwargs, using=using, stopping=is_stopping)
    if isinstance(found, Discard):
        logger.info("outbox.delivery.discarded entry_id=%s task=%s: %s", uuid, task.name, found)
    return found


def _trace(task: OutboxTask, tracer: Tracer, claim: Claim, request: dict[str, Any]) -> Any:
    current = run.Run(claim)
    request.update(run.as_request(current))
    try:
        traced = tracer(str(claim.id), claim.args, claim.kwargs, request)
    except BaseException as error:
        return _left(task, current, error)
    if not current.ended:
        # A before_start that raised never reaches __call__.
        run.end_unrecorded(task, current, traced.retval)
    return traced


def _left(task: OutboxTask, current: run.Run, error: BaseException) -> Any:
    """A SystemExit of a handler, such as before_start, would wedge a thread or end the worker."""
    if run.is_told_to_end(error):
        raise error
    logger.error("outbox.run.left entry_id=%s task=%s", current.claim.id, task.name, exc_info=error)
    if not current.ended:
        run.end_unrecorded(task, current, error)
    return _returned(Ignore("left its tracer"), IGNORED)


def _unclaimed(task: OutboxTask, uuid: str, error: Exception) -> Any:
    """The claim could not be made. The row is as it was: reconcile will find its message gone."""
    if is_outage(error):  # and the worker stops: another one shall have it now
        return _given_back(error)
    logger.error("outbox.claim.failed entry_id=%s task=%s", uuid, task.name, exc_info=error)
    return _returned(Ignore(str(error)), IGNORED)


def _given_back(reason: BaseException) -> Any:
    return _returned(Reject(reason, requeue=True), REJECTED)


def _returned(error: Exception, state: str) -> Any:
    try:
        raise error
    except type(error):
        return trace_ok_t(ExceptionInfo(internal=True), TraceInfo(state, error), 0.0, None)

"""run: the body under its claim, and the one ending that it gets."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback as tracebacks
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NoReturn

from celery.exceptions import Ignore, Reject, Retry, WorkerShutdown, WorkerTerminate
from django.db import InterfaceError, OperationalError, transaction

from outbox.errors import Cancelled, EffectUncertain, EffectUnderWay
from outbox.failpoints import Failpoint, reach
from outbox.lifecycle import finish, leftovers
from outbox.lifecycle.claim import Claim
from outbox.transitions import Ending
from outbox.worker import soft_limit
from outbox.worker.stopping import is_stopping

if TYPE_CHECKING:
    from outbox.tasks import OutboxTask

logger = logging.getLogger("outbox")

REQUEST_KEY = "outbox_run"

_TERMINATED = -(256 - signal.SIGTERM)  # SIGTERM to a child: billiard/common.py, _shutdown_cleanup


class Run:
    """What this process knows of the run that it owns: the claim, and how far it has come."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.pid = os.getpid()
        self.entered = False  # the body has begun: a nested call of the same task is a plain one
        self.ended = False  # an ending was recorded, or refused
        self.retrying = False  # inside Task.retry(), which ends in apply_async of our own ID
        self.again: finish.Again | None = None  # what retry() asked for
        self.effects: set[str] = set()  # keys of those that the body has asked for
        self.unsettled: set[str] = set()  # keys of effects whose outcome it does not know


class TaskExited(Exception):
    """The body left by SystemExit, MemoryError or the like, which would wedge or end the worker."""


def as_request(run: Run) -> dict[str, Any]:
    """What the row knows better than the message, for `task.request`."""
    claim, options = run.claim, run.claim.options
    return {
        **options.get("headers", {}),
        REQUEST_KEY: run,
        "headers": options.get("headers", {}),
        "retries": claim.retries,
        "root_id": str(claim.root_id or claim.id),
        "parent_id": claim.parent_id and str(claim.parent_id),
        "callbacks": options.get("callbacks"),
        "errbacks": None,  # owed by the ending: Celery calls none, whatever it meets
        "chain": options.get("chain"),
        "chord": options.get("chord"),
        "group": options.get("group_id"),
        "group_index": options.get("group_index"),
    }


def current(task: OutboxTask) -> Run | None:
    """The run that the task's request belongs to; None where it is called plainly or eagerly."""
    return getattr(task.request, REQUEST_KEY, None)


def perform(task: OutboxTask, run: Run, args: Any, kwargs: Any) -> Any:
    """Run the body, record its ending, and tell Celery's tracer what was recorded.

    Raises what Celery expects of the outcome: Retry, Ignore (nothing to store), or the error.
    """
    run.entered = True
    if soft_limit.is_over():  # while it waited for the database: not the task's fault
        run.ended = True
        why = "its soft time limit was over before it began"
        finish.release(run.claim, reason=why, again=True)
        raise Ignore("released")
    before = leftovers.in_transaction()
    try:
        if task.atomic:
            return _perform_atomic(task, run, args, kwargs)
        result = _body(task, run, args, kwargs)
        _check_leftovers(before)
        for key in run.unsettled:
            raise EffectUncertain("the body went on without knowing its outcome", key=key)
        reach(Failpoint.RETURNED)
        return _succeeded(task, run, result)
    except BaseException as error:
        leftovers.close(but=before)
        if run.ended:
            raise
        return _raised(task, run, error)


def _body(task: OutboxTask, run: Run, args: Any, kwargs: Any) -> Any:
    task.request.errbacks = run.claim.options.get("errbacks")  # the body may look at them
    try:
        with soft_limit.let_in():
            return task.run(*args, **kwargs)
    finally:
        task.request.errbacks = None
        if os.getpid() != run.pid:
            _end_copy(run)


def _end_copy(run: Run) -> NoReturn:
    """The body forked, and its copy leaves the body too: the run is its parent's."""
    logger.error("outbox.run.copied entry_id=%s pid=%s: ended", run.claim.id, os.getpid())
    os._exit(1)


def _check_leftovers(before: Collection[str]) -> None:
    if left := leftovers.close(but=before):
        raise leftovers.OpenTransaction(f"the body left a transaction open on {left}")


class _Body:
    """How the body of an atomic run has left."""

    result: Any = None
    returned = False
    raised: BaseException | None = None
    ignored: Ignore | None = None  # Celery's "done, store nothing": its effects count


def _perform_atomic(task: OutboxTask, run: Run, args: Any, kwargs: Any) -> Any:
    """Body and completion commit together; the entry is touched only by the last statement."""
    body = _Body()
    try:
        with transaction.atomic(using=run.claim.using):
            _enter(body, task, run, args, kwargs)
            reach(Failpoint.RETURNED)
            _stand(finish.succeed(task, run.claim, body.result))
    except finish.Discarded:
        run.ended = True
        finish.late(run.claim)  # again, since the rollback took its event along
        raise
    except (OperationalError, InterfaceError):
        if body.raised is not None:  # the rollback met a database that is away: that is no news
            raise body.raised from None
        if not body.returned:
            raise
        # Rolled back with the connection, or committed and the reply lost: then this finds nothing.
        run.ended = True
        why = "the database went away while it committed"
        finish.release(run.claim, reason=why, again=True)
        raise Ignore("released") from None
    run.ended = True
    if body.ignored is not None:
        raise body.ignored
    return body.result


def _enter(body: _Body, task: OutboxTask, run: Run, args: Any, kwargs: Any) -> None:
    """Run it inside its transaction, and see that it has left that as it was."""
    alias, token = run.claim.using, str(run.claim.token)
    leftovers.mark(alias, token)
    before, depth = leftovers.in_transaction(), leftovers.depth(alias)
    try:
        body.result = _body(task, run, args, kwargs)
    except Ignore as error:
        body.ignored = error
    except BaseException as error:
        body.raised = error
        raise
    body.returned = True  # what the looks below meet is not the body's
    if leftovers.depth(alias) != depth:
        raise leftovers.OpenTransaction(f"the body left a transaction open on {[alias]}")
    if not leftovers.is_marked(alias, token):
        raise leftovers.EndedTransaction(alias)
    _check_leftovers(before)


def _succeeded(task: OutboxTask, run: Run, result: Any) -> Any:
    ending = finish.succeed(task, run.claim, result)
    run.ended = True
    _stand(ending)
    return result


def _raised(task: OutboxTask, run: Run, error: BaseException) -> Any:
    """Record what the body raised, and raise what Celery should hear."""
    if is_told_to_end(error):
        run.ended = True
        # Of a child the clerk says what it means, when that is gone.
        if is_stopping() or not isinstance(error, SystemExit):
            finish.give_back(run.claim, reason="it was told to end")
        raise error
    if isinstance(error, Cancelled) and finish.settle(run.claim, reason=str(error)):
        run.ended = True
        raise error
    if isinstance(error, EffectUnderWay):
        run.ended = True
        finish.postpone(run.claim, until=error.until, reason=str(error))
        raise error
    if isinstance(error, EffectUncertain) or (isinstance(error, Ignore) and run.unsettled):
        return _end(run, finish.park(run.claim, error), Ignore("parked"))
    if isinstance(error, Ignore) and not isinstance(
        error, Cancelled
    ):  # Celery's "done, store nothing"
        return _end(run, finish.succeed(task, run.claim, None), error)
    if isinstance(error, Retry):
        again = run.again or finish.Again.from_exception(error, task)
        ending, final = finish.retry(task, run.claim, again, _cause(error))
        return _end(run, ending, _plain(_cause(error)) if final else error)
    if isinstance(error, Reject):
        error = error.reason if isinstance(error.reason, Exception) else _plain(error)
    return _end(run, finish.fail(task, run.claim, error), _plain(error))


def is_told_to_end(error: BaseException) -> bool:
    """What comes from outside: SIGTERM to a child, a killed greenlet, a hard stop of the worker."""
    if isinstance(error, WorkerShutdown | WorkerTerminate):  # in solo, in the middle of a body
        return True
    greenlet = sys.modules.get("greenlet")
    if greenlet is not None and isinstance(error, greenlet.GreenletExit):
        return True
    return isinstance(error, SystemExit) and error.code == _TERMINATED


def _cause(error: Retry) -> BaseException:
    return error.exc if isinstance(error.exc, BaseException) else error


def _plain(error: BaseException) -> Exception:
    """Neither SystemExit nor MemoryError may leave: they wedge or kill the worker."""
    if isinstance(error, Exception) and not isinstance(error, MemoryError | Reject):
        return error
    return TaskExited(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)


def _end(run: Run, ending: Ending, tell: BaseException) -> Any:
    run.ended = True
    _stand(ending)
    raise tell


def _stand(ending: Ending) -> None:
    if ending not in finish.STANDS:
        raise finish.Discarded(ending.value)


def end_unrecorded(task: OutboxTask, run: Run, retval: Any) -> None:
    """The tracer came back, or raised, and the body never ran: record what it met instead."""
    run.ended = True
    error = getattr(retval, "exception", retval)
    error = getattr(error, "exc", error)
    if not isinstance(error, BaseException):
        error = TaskExited(f"{task.name} returned without running its body")
    text = str(getattr(retval, "traceback", "") or "".join(tracebacks.format_exception(error)))
    finish.fail(task, run.claim, error, traceback=text)

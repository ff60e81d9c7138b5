"""finish: succeed, retry or fail, recorded under the claim's token; what follows goes with it."""

from __future__ import annotations

import logging
import traceback as tracebacks
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.exceptions import Ignore, Retry
from celery.utils.time import maybe_iso8601, maybe_make_aware
from django.db import transaction

from outbox import payload, transitions
from outbox.clock import backoff
from outbox.conf import settings
from outbox.errors import PayloadError
from outbox.events import Note
from outbox.lifecycle import follow
from outbox.lifecycle.claim import Claim
from outbox.lifecycle.raised import as_stored
from outbox.outage import until_answered
from outbox.states import Verb
from outbox.transitions import Ending, Holder

if TYPE_CHECKING:
    from outbox.tasks import OutboxTask

logger = logging.getLogger("outbox")

STANDS = frozenset({Ending.RECORDED, Ending.REPEATED, Ending.GAVE_UP})


class Discarded(Ignore):
    """The entry is no longer this run's: nothing was recorded, and Celery stores nothing."""


@dataclass(frozen=True)
class Again:
    """What a retry asks for: when, and what it rewrites in the entry."""

    delay: timedelta | datetime
    changes: dict[str, Any] = field(default_factory=dict)
    checked: bool = False  # Task.retry() has compared it with max_retries, perhaps its caller's

    @classmethod
    def from_exception(cls, error: Retry, task: OutboxTask) -> Again:
        """A Retry that was raised by hand; `when` is seconds or a time."""
        when = task.default_retry_delay if error.when is None else error.when
        return cls(when_to_run(when, task))


def when_to_run(when: Any, task: OutboxTask) -> timedelta | datetime:
    """Seconds, an ISO string or a datetime, as Celery's `countdown` and `eta` take them."""
    if isinstance(when, int | float):
        return timedelta(seconds=when)
    if isinstance(when, timedelta):
        return when
    found: datetime = maybe_make_aware(maybe_iso8601(when), task.app.timezone)
    return found


def succeed(task: OutboxTask, claim: Claim, result: Any) -> Ending:
    """Record the success, its result, and with them whatever is linked to it."""
    text = _result_text(task, claim, result)
    return until_answered(
        partial(_succeed, task, claim, result, text), using=claim.using, what="completing"
    )


def _succeed(task: OutboxTask, claim: Claim, result: Any, text: str | None) -> Ending:
    record = partial(
        transitions.succeed,
        claim.id,
        token=claim.token,
        result=text,
        task=claim.task,
        owner=claim.owner,
        using=claim.using,
    )
    request = task.request
    if not (request.callbacks or request.chain):
        return record()
    with transaction.atomic(using=claim.using):
        ending = record()
        if ending is Ending.RECORDED:
            follow.owe_links(task, claim, result)
    request.callbacks = request.chain = None  # written: Celery must not publish them too
    return ending


def late(claim: Claim) -> Ending:
    """Record that a run ended which no longer owned its entry, and settle a cancelled one."""
    return until_answered(
        partial(
            transitions.late,
            claim.id,
            Verb.SUCCEED,
            token=claim.token,
            note=Note("worker"),
            using=claim.using,
        ),
        using=claim.using,
        what="completing",
    )


def _result_text(task: OutboxTask, claim: Claim, result: Any) -> str | None:
    """Recording an end must never fail because of what it says: a bad result is left out."""
    if result is None or claim.options.get("ignore_result", task.ignore_result):
        return None
    try:
        text = payload.dumps(result)
    except PayloadError as error:
        logger.warning("outbox.result.dropped entry_id=%s: it %s", claim.id, error)
        return None
    if len(text.encode()) > settings().MAX_PAYLOAD_BYTES:
        logger.warning("outbox.result.dropped entry_id=%s: it is too large", claim.id)
        return None
    return text


def retry(
    task: OutboxTask, claim: Claim, again: Again, error: BaseException
) -> tuple[Ending, bool]:
    """Record a failure with budget left; without, a failure for good. Whether it was for good."""
    if _budget_is_gone(task, claim, again):
        return fail(task, claim, error), True
    ending = until_answered(
        partial(
            transitions.retry,
            claim.id,
            token=claim.token,
            delay=again.delay,
            note=_note(claim, error),
            changes=again.changes,
            using=claim.using,
        ),
        using=claim.using,
        what="recording a retry",
    )
    return ending, ending is Ending.GAVE_UP


def _budget_is_gone(task: OutboxTask, claim: Claim, again: Again) -> bool:
    limit = claim.failure_limit
    if limit is None and not again.checked and task.max_retries is not None:
        limit = claim.forgiven_failures + task.max_retries + 1
    return limit is not None and claim.failures + 1 >= limit


def usual_pause(task: OutboxTask, retries: int) -> timedelta:
    """The pause before the next attempt by the task's own retry options."""
    first = float(getattr(task, "retry_backoff", 0) or 0)
    if not first:
        return timedelta(seconds=task.default_retry_delay or 0)
    return backoff(retries, first=first, maximum=int(getattr(task, "retry_backoff_max", 600)))


def fail(
    task: OutboxTask, claim: Claim, error: BaseException, *, traceback: str | None = None
) -> Ending:
    """Record a failure for good; the error and its traceback stay, the owner is told."""
    return until_answered(
        partial(
            transitions.fail,
            claim.id,
            token=claim.token,
            note=_note(claim, error, traceback=traceback),
            using=claim.using,
        ),
        using=claim.using,
        what="recording a failure",
    )


def release(claim: Claim, *, reason: str, again: bool = False) -> bool:
    """Give the entry back; burns nothing. Due now, or where that comes `again`, later each time."""
    before = claim.attempts - claim.failures - 1 if again else 0
    delay = backoff(before - 1, first=settings().CRASH_BACKOFF) if before > 0 else timedelta()
    return _release(claim, delay=delay, note=Note("worker", reason))


def _release(claim: Claim, *, delay: timedelta | datetime, note: Note) -> bool:
    return until_answered(
        partial(
            transitions.release,
            claim.id,
            holder=Holder(token=claim.token),
            delay=delay,
            note=note,
            using=claim.using,
        ),
        using=claim.using,
        what="releasing",
    )


def park(claim: Claim, error: BaseException) -> Ending:
    """Record that the outcome of an effect is unknown: a person is asked."""
    return until_answered(
        partial(
            transitions.park,
            claim.id,
            token=claim.token,
            note=_note(claim, error),
            using=claim.using,
        ),
        using=claim.using,
        what="parking",
    )


def postpone(claim: Claim, *, until: datetime, reason: str) -> bool:
    """Give the entry back until that time; burns nothing."""
    return _release(claim, delay=until, note=Note("worker", reason))


def give_back(claim: Claim, *, reason: str) -> None:
    """Release a run that was ended from outside; settle it where that was for a cancellation."""
    if not release(claim, reason=reason):
        settle(claim, reason=reason)


def settle(claim: Claim, *, reason: str) -> bool:
    """The run of a cancelled entry is over. False: it is not cancelled, or another's by now."""
    return until_answered(
        partial(
            transitions.settle,
            claim.id,
            holder=Holder(token=claim.token),
            note=Note("worker", reason),
            using=claim.using,
        ),
        using=claim.using,
        what="settling",
    )


def _note(claim: Claim, error: BaseException, *, traceback: str | None = None) -> Note:
    text = traceback or "".join(tracebacks.format_exception(error))
    exception = as_stored(error) if claim.options.get("errbacks") else ""
    words = f"{type(error).__name__}: {error}"
    return Note("worker", error=words, traceback=text, exception=exception)

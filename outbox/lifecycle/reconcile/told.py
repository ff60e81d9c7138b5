"""What Celery's `AsyncResult` should say of an entry: its state, and the value or the error."""

from __future__ import annotations

import builtins
import re
from collections.abc import Mapping
from typing import Any

import celery.exceptions
from celery import states
from celery.app.task import Context
from celery.exceptions import TaskRevokedError
from celery.utils.serialization import create_exception_cls

from outbox.errors import EntryFailed
from outbox.models import OutboxEntry
from outbox.states import State

UNCERTAIN = "UNCERTAIN"  # Celery has no such state, and takes it for one that is not ready

_FIXED: Mapping[State, str] = {
    State.SUCCEEDED: states.SUCCESS,
    State.FAILED: states.FAILURE,
    State.CANCELLED: states.REVOKED,
    State.RUNNING: states.STARTED,
    State.UNCERTAIN: UNCERTAIN,
}
# As `Note` has it of an exception: the name of its class, and what it says.
_RAISED = re.compile(r"([A-Za-z_]\w*): ?(.*)", re.DOTALL)


def state(entry: OutboxEntry) -> str:
    """The state, by the table of the states: owed again after an attempt is a retry."""
    owed: str = states.RETRY if _was_attempted(entry) else states.PENDING
    return _FIXED.get(State(entry.status), owed)


def _was_attempted(entry: OutboxEntry) -> bool:
    """Since it was enqueued, or since a person's requeue, which gives it a new `due_at`."""
    if entry.retries > 0:
        return True
    return entry.started_at is not None and entry.started_at >= entry.due_at


def value(entry: OutboxEntry) -> Any:
    """What is stored beside the state."""
    match state(entry):
        case states.SUCCESS:
            return entry.result
        case states.FAILURE | states.RETRY:
            return _error(entry)
        case states.REVOKED:
            return TaskRevokedError("cancelled")
        case states.STARTED:
            return {"pid": entry.lease_pid}
    return None


def request(entry: OutboxEntry, *, worker: str | None) -> Context:
    """What the backend keeps of the call. Of arguments no more than the message says."""
    return Context(
        id=str(entry.pk),
        task=entry.task,
        argsrepr="",
        kwargsrepr="",
        hostname=worker,
        children=[],
    )


def _error(entry: OutboxEntry) -> Exception:
    raised = _RAISED.fullmatch(entry.error)
    if raised is None:  # a crash, a deadline, an expiry: the words of the outbox
        return EntryFailed(entry.error or "it is to run again")
    name, words = raised.groups()
    module = _module(name, entry.traceback)
    # The backend stores names, and looks the class up when somebody asks for the result.
    return create_exception_cls(name, module)(words)  # type: ignore[no-any-return]


def _module(name: str, traceback: str) -> str:
    """Where a class of that name is: the traceback's last line names the module of most."""
    lines = re.findall(rf"^([\w.]+)\.{name}(?::|$)", traceback, re.MULTILINE)
    if lines:
        return str(lines[-1])
    return builtins.__name__ if hasattr(builtins, name) else celery.exceptions.__name__

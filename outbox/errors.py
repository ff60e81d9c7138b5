"""Everything that this package raises on purpose. Losing a race is a value, never one of these."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from celery.exceptions import Ignore
from django.core.exceptions import ImproperlyConfigured


class OutboxError(Exception):
    """The root: catch this to catch all."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Python would call the class with `args` alone, which one that takes more refuses. What
        # leaves a body is pickled by a pool's child, and a worker that cannot load it dies.
        return _again, (type(self), self.args), vars(self)


def _again(kind: type[OutboxError], args: tuple[Any, ...]) -> OutboxError:
    return kind.__new__(kind, *args)


class ConfigurationError(OutboxError, ImproperlyConfigured):
    """A setting or a task option that cannot work. The message names it and what to do."""


class MisuseError(OutboxError, TypeError):
    """A call that the extension cannot honour, such as `retry(throw=False)`."""


class Cancelled(OutboxError, Ignore):
    """Raised by `raise_if_cancelled()` in a run whose end would be discarded. Let it leave."""


class PayloadError(OutboxError, ValueError):
    """Arguments or options that cannot be stored. Raised in the caller, before any SQL."""

    def __init__(self, message: str, *, task: str | None = None) -> None:
        super().__init__(message)
        self.task = task


class UnknownQueueError(OutboxError, LookupError):
    """The queue is not in `task_queues` and `task_create_missing_queues` is off."""

    def __init__(self, message: str, *, queue: str) -> None:
        super().__init__(message)
        self.queue = queue


class BrokerUnavailable(OutboxError):
    """The broker did not take the messages. The rows stay pending; nothing is lost."""


class Overtaken(OutboxError):
    """A run of maintenance lost its lease while it went on: it leaves, and records nothing."""


class EntryFailed(OutboxError):
    """What `AsyncResult.get()` raises of an entry that failed without a run of it raising."""


class NotFollowed(OutboxError):
    """What follows an entry's end cannot be published, or is not known to this worker: later."""


class NotPerformed(OutboxError):
    """Raised by `perform` where the effect has certainly not happened, such as a refused recipient.

    It may then be tried again as if it had never been begun. `raise NotPerformed from error`: the
    task meets that error, with its own retry rules.
    """


class EffectMismatch(OutboxError, ValueError):
    """The same effect with another request: an error in the task, and not a second effect."""


class EffectUncertain(OutboxError, Ignore):
    """Nobody knows whether the effect happened: in a task the entry is parked. Let it leave."""

    def __init__(self, message: str, *, key: str) -> None:
        super().__init__(message)
        self.key = key


class EffectUnverified(OutboxError):
    """`verify` could not say; why is the cause. In a task that is a failure, tried again."""


class EffectUnderWay(OutboxError, Ignore):
    """It has not happened, and whoever began it may still be at it. In a task: tried again then."""

    def __init__(self, key: str, *, until: datetime) -> None:
        super().__init__(f"{key} may still be performed until {until:%Y-%m-%d %H:%M:%S %Z}")
        self.key, self.until = key, until

"""Deliveries that never become a run: unknown tasks, and what is no Celery message at all.

Celery stores FAILURE for an unknown task, and ends the worker on a message that it cannot take
apart. Here the row decides what a delivery means, so the clerk is asked first; a message stays
unacknowledged until it has answered. And a broker that goes away takes no worker with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import UUID

from celery import bootsteps
from celery.worker.state import active_requests

from outbox import transitions
from outbox.clock import as_uuid
from outbox.conf import default_database, settings
from outbox.lifecycle.decline import Answer, decline
from outbox.lifecycle.publish import DATABASE_HEADER
from outbox.worker import counts, inbox

logger = logging.getLogger("outbox")

# What data that is not as it should be raises, in kombu's and Celery's code alike.
_BAD_DATA = (ValueError, LookupError, TypeError, AttributeError, RecursionError)

_PATIENCE = 3.0  # seconds that a publisher may take between its flush and its mark


class ConsumerStep(bootsteps.StartStopStep):
    """Puts itself between Celery's consumer and what it would do with such deliveries."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self.consumer = parent
        self.delivering = False
        self._take_over("on_unknown_task", counts.UNKNOWN_TASK, message_at=1)
        self._take_over("on_invalid_task", counts.UNREADABLE, message_at=1)
        self._take_over("on_unknown_message", counts.UNREADABLE, message_at=1)
        self._take_over("on_decode_error", counts.UNREADABLE, message_at=0)
        self._celerys_on_loss = parent.on_connection_error_after_connected
        parent.on_connection_error_after_connected = self._on_connection_lost
        self._create_task_handler = parent.create_task_handler
        parent.create_task_handler = self._guarded_task_handler

    def start(self, parent: Any) -> None:
        """Each connection has channels of its own."""
        handlers = getattr(parent.task_consumer.channel, "handlers", {})
        if "BRPOP" in handlers:  # kombu's Redis transport
            handlers["BRPOP"] = partial(self._read, handlers["BRPOP"])

    def stop(self, parent: Any) -> None:
        """The channels end with their connection."""

    def _on_connection_lost(self, error: Exception) -> None:
        """What was taken over a lost connection is given back or acknowledged only if that works.

        kombu 5.7 tries both after Celery has taken the connection apart, and what it raises then
        ends the worker. Whatever stays in the broker as taken and does not run, reconcile finds.
        """
        transport = getattr(self.consumer.connection, "transport", None)
        for channel in list(getattr(transport, "channels", ())):
            channel.basic_ack = _if_it_works(channel.basic_ack)
            channel.basic_reject = _if_it_works(channel.basic_reject)
            channel.qos.restore_unacked_once = _if_it_works(channel.qos.restore_unacked_once)
        self._celerys_on_loss(error)

    def _take_over(self, name: str, reason: str, *, message_at: int) -> None:
        celerys = getattr(self.consumer, name)

        def ask_first(*args: Any) -> None:
            self._ask(args[message_at], reason, otherwise=partial(celerys, *args))

        setattr(self.consumer, name, ask_first)

    def _guarded_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], None]:
        handle = self._create_task_handler(*args, **kwargs)

        def on_task_received(message: Any) -> None:
            self.delivering = True
            try:
                _check_time_limits(message.headers)
                handle(message)
            except _BAD_DATA as error:
                if _has_begun(message):
                    raise
                self._ask(message, counts.UNREADABLE, otherwise=partial(self._drop, message, error))

        return on_task_received

    def _read(self, read: Callable[..., Any], **options: Any) -> Any:
        """Take one item from the broker. What is not even a message is gone with that."""
        self.delivering = False
        try:
            return read(**options)
        except _BAD_DATA as error:
            if self.delivering:
                raise
            counts.add(counts.UNREADABLE)
            logger.error("outbox.delivery.unreadable: %s: %s", type(error).__name__, error)
            return True

    def _ask(self, message: Any, reason: str, *, otherwise: Callable[[], Any]) -> None:
        """Let the clerk look whether it is an entry's; `otherwise` is what Celery would do."""
        counts.add(reason)
        headers = message.headers if isinstance(message.headers, dict) else {}
        entry_id = as_uuid(headers.get("id"))
        using = headers.get(DATABASE_HEADER) or default_database()
        if entry_id is None or using not in settings().DATABASES:
            otherwise()
            return
        words = f"{reason}: {str(headers.get('task'))[:200]}"
        until = time.monotonic() + _PATIENCE
        inbox.put(partial(self._decide, message, entry_id, words, until, otherwise, using=using))

    def _decide(
        self,
        message: Any,
        entry_id: UUID,
        reason: str,
        until: float,
        otherwise: Callable[[], Any],
        *,
        using: str,
    ) -> bool:
        """In the clerk's thread: what the row says. The consumer acts on it in its own."""
        with transitions.short_of_patience(using=using):
            answer = decline(entry_id, reason=reason, using=using)
        if answer is Answer.NOT_MARKED and time.monotonic() < until:
            return False
        if answer is Answer.ALIEN:
            self.consumer.call_soon(otherwise)
        else:
            words = f"{reason}, {answer.value}"
            logger.warning("outbox.delivery.refused entry_id=%s: %s", entry_id, words)
            self.consumer.call_soon(partial(self._acknowledge, message))
        return True

    def _acknowledge(self, message: Any) -> None:
        message.ack_log_error(logger, self.consumer.connection_errors)

    def _drop(self, message: Any, error: Exception) -> None:
        logger.error("outbox.delivery.unreadable: %s: %s", type(error).__name__, error)
        message.reject_log_error(logger, self.consumer.connection_errors)


def _if_it_works(settle: Callable[..., Any]) -> Callable[..., None]:
    def attempt(*args: Any, **kwargs: Any) -> None:
        try:
            settle(*args, **kwargs)
        except Exception as error:
            logger.info("outbox.delivery.unsettled: %s: %s", type(error).__name__, error)

    return attempt


def _check_time_limits(headers: Any) -> None:
    """Celery looks at them when it has taken a slot of the pool, which it would never give back.

    Raises:
        ValueError: they are not what Celery writes.
    """
    limits = headers.get("timelimit") if isinstance(headers, dict) else None
    if limits is None:
        return
    if not isinstance(limits, list | tuple) or len(limits) != 2 or not all(map(_is_limit, limits)):
        raise ValueError(f"time limits {limits!r:.80}")


def _is_limit(limit: Any) -> bool:
    if limit is None:
        return True
    return isinstance(limit, int | float) and not isinstance(limit, bool) and 0 < limit < 10**9


def _has_begun(message: Any) -> bool:
    """Whether a job runs for it: its error is not the message's fault (solo runs it right here)."""
    return any(request.message is message for request in list(active_requests))

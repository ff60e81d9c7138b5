"""What the task needs to know of the way that a receipt takes: `by_smtp` or `by_provider`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.core.mail import EmailMultiAlternatives

from outbox.effects import Verify


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a receipt is sent, and what is done where nobody knows whether it was.

    `send` takes the message and its idempotency key. It raises `NotPerformed` where the message was
    certainly not taken, and anything else where that is unknown. The rest is as `OutboxTask.effect`
    takes it.
    """

    send: Callable[[EmailMultiAlternatives, str], Any]
    verify: Verify | None = None
    on_uncertain: str = "park"
    timeout: float | None = None
    repeat_within: float | None = None

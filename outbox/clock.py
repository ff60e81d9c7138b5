"""IDs that sort by time, and the one backoff of failures and crashes.

Times that matter are the database's (`STATEMENT_TIMESTAMP()`): no wall clock is read here but
for the ID's prefix, on whose accuracy nothing depends.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from uuid import UUID

from celery.utils.time import get_exponential_backoff_interval

LONGEST_BACKOFF = 600  # seconds: Celery's default `retry_backoff_max`


def new_id() -> UUID:
    """A UUID version 7 (RFC 9562, section 5.7): new rows land at the right edge of the index."""
    millis = time.time_ns() // 1_000_000
    random = int.from_bytes(os.urandom(10), "big")
    high, low = random >> 62 & 0xFFF, random & (1 << 62) - 1
    return UUID(int=millis << 80 | 0x7 << 76 | high << 64 | 0b10 << 62 | low)


def as_uuid(value: object) -> UUID | None:
    """The UUID that `value` is or spells; None where it is neither."""
    try:
        return value if isinstance(value, UUID) or value is None else UUID(str(value))
    except ValueError:
        return None


def backoff(count: int, *, first: float, maximum: int = LONGEST_BACKOFF) -> timedelta:
    """The pause before the next attempt: Celery's own curve, jittered, `first` seconds doubling."""
    exponent = min(count, 30)  # past that every curve is at its maximum
    seconds = get_exponential_backoff_interval(
        factor=max(1, round(first)), retries=exponent, maximum=maximum, full_jitter=True
    )
    return timedelta(seconds=seconds)

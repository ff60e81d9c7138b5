"""The second truth: what the broker really holds."""

from __future__ import annotations

from typing import Any

from outbox.brokers.connections import is_redis
from outbox.errors import BrokerUnavailable
from outbox.lifecycle.reconcile import listed, unlisted
from outbox.lifecycle.reconcile.findings import Pass


def compare(this: Pass) -> dict[str, Any]:
    """Look at it and repair; where it does not answer, say so and leave everything as it is."""
    try:
        return listed.compare(this) if is_redis(this.app) else unlisted.compare(this)
    except BrokerUnavailable as error:
        return {"broker": str(error)}

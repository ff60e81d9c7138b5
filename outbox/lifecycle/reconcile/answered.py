"""Answered: a person was asked about an effect, and who performed it has told meanwhile."""

from __future__ import annotations

from outbox import transitions
from outbox.conf import settings
from outbox.lifecycle.reconcile.findings import Pass
from outbox.models import OutboxEntry


def resolve(this: Pass) -> int:
    """Let the bodies run on whose effects the ledger knows by now; how many."""
    rows = OutboxEntry.objects.using(this.using).answered()
    limit = settings().REPAIRS_PER_PASS
    if this.dry:
        return rows[:limit].count()
    return transitions.resolve_answered(rows, limit=limit)

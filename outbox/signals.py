"""Django signals, one for each verb, sent after the transition's commit; and one for pagers.

Those of verbs carry `entry_id` (UUID), `task` (name), `status` (the state arrived at: a crash may
end in "failed"), `owner` (str) and `using` (database alias). `owner_needed` is sent where somebody
should look: an entry failed for good, waits for a person, or is over age. Instead of a status it
carries `about`: "failed", "uncertain" or "over_age". A receiver that raises stops nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from uuid import UUID

from django.db import transaction
from django.dispatch import Signal

from outbox.states import EDGES, Verb

by_verb: Mapping[Verb, Signal] = MappingProxyType({verb: Signal() for verb in EDGES})

entry_retried = by_verb[Verb.RETRY]
entry_failed = by_verb[Verb.FAIL]
entry_parked = by_verb[Verb.PARK]
entry_crashed = by_verb[Verb.CRASH]
entry_stranded = by_verb[Verb.STRAND]
entry_expired = by_verb[Verb.EXPIRE]
entry_rejected = by_verb[Verb.REJECT]
entry_cancelled = by_verb[Verb.CANCEL]
entry_requeued = by_verb[Verb.REQUEUE]

owner_needed = Signal()


def announce(verb: Verb, *, entry_id: UUID, task: str, status: str, owner: str, using: str) -> None:
    """Send the verb's signal once the surrounding transaction has committed."""
    signal = by_verb[verb]
    if not signal.receivers:
        return

    def send() -> None:
        told = {"entry_id": entry_id, "task": task, "status": status}
        signal.send_robust(sender=verb, **told, owner=owner, using=using)

    transaction.on_commit(send, using=using, robust=True)


def announce_need(*, entry_id: UUID, task: str, about: str, owner: str, using: str) -> None:
    """Send `owner_needed` once the surrounding transaction has committed; `owner` may be empty."""
    if not owner_needed.receivers:
        return

    def send() -> None:
        told = {"entry_id": entry_id, "task": task, "about": about, "owner": owner}
        owner_needed.send_robust(sender=about, **told, using=using)

    transaction.on_commit(send, using=using, robust=True)

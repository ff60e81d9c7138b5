"""Owners who are to be told of something, and to whom no message is owed.

One that was on its way may have taken what it tells before this was committed, or have failed for
good.
"""

from __future__ import annotations

from outbox import transitions
from outbox.conf import settings
from outbox.lifecycle.reconcile.findings import Pass
from outbox.transitions import TELL_OWNER


def tell(this: Pass) -> int:
    """Owe each of them a message; to how many."""
    waiting = transitions.has_no_message(transitions.untold(using=this.using))
    found = waiting.order_by("owner").values_list("owner", flat=True).distinct()
    owners = list(found[: settings().REPAIRS_PER_PASS])
    if owners and not this.dry:
        transitions.owe_untold(owners, queue=this.queue_of(TELL_OWNER), using=this.using)
    return len(owners)

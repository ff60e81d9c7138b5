"""A broker that cannot be listed: by leases, by what workers say they hold, and by empty queues.

The promise is weaker. An entry whose message is lost waits until its queue is empty.
"""

from __future__ import annotations

from typing import Any

from outbox import workers
from outbox.brokers import fallback
from outbox.lifecycle.reconcile import strands
from outbox.lifecycle.reconcile.findings import Pass

_EMPTY = "its queue is empty, and no live worker holds its message"


def compare(this: Pass) -> dict[str, Any]:
    """Find the published entries that neither a queue nor a live worker can have."""
    rows = strands.published(this)
    queues = rows.order_by().values_list("queue", flat=True).distinct()
    empty = fallback.empty(this.app, queues=set(queues))
    held = strands.uuids(workers.held_by_the_living(using=this.using))
    nowhere = rows.filter(queue__in=empty).exclude(pk__in=held).values("pk")
    gone = strands.past_grace(this).filter(pk__in=nowhere)
    missing = strands.mark(this, gone)
    strands.unmark(this, rows.exclude(pk__in=nowhere))
    # A whole lease apart: nothing else tells a lost message from one that was taken just now.
    after = strands.whole_lease()
    return {
        "unlisted": fallback.why_unlisted(this.app),
        "missing": missing,
        "stranded": strands.strand(this, gone, after=after, reason=_EMPTY),
    }

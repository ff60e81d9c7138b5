"""A broker whose queues can be listed: each message against its entry, and the other way round."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from outbox import workers
from outbox.brokers import redis
from outbox.brokers.messages import ids
from outbox.failpoints import Failpoint, reach
from outbox.lifecycle.reconcile import published, strands, strays
from outbox.lifecycle.reconcile.findings import Pass
from outbox.models import EntryQuerySet

_LOST = "the broker holds no message for it"
_ORPHANED = "only a worker that is gone holds its message"


def compare(this: Pass) -> dict[str, Any]:
    """Find the messages without a published entry, and the published entries without a message.

    The rows are read first, and whatever is seen of them is taken out of the set.
    """
    unseen: set[bytes] = set()
    for page in published.ids(this):
        unseen.update(page)
    found = strays.Strays()
    with redis.looking(this.app) as look:
        for messages in redis.lists(look, published.queues(this)):
            _see(this, found, messages, unseen)
        taken = {one for raws in redis.unacked(look) for one in ids(raws) if one in unseen}
        strays.remove(this, found, look)
    unseen -= workers.held_by_the_living(using=this.using)
    reach(Failpoint.FOUND)
    refused = look.refused
    repaired = _repair(this, unseen, orphaned=unseen & taken, unread=refused)
    return {**found.counts(), **repaired, "skipped": _skipped(refused)}


def _see(this: Pass, found: strays.Strays, messages: redis.Messages, unseen: set[bytes]) -> None:
    known = ids(messages.raws)
    here = set(known)
    here.discard(None)
    if not here <= unseen:
        others = here - unseen
        strays.see(this, found, messages, [one if one in others else None for one in known])
    unseen -= here
    found.queued += len(known)
    this.renew()


def _skipped(refused: Mapping[str, str]) -> str:
    each = refused.items()
    return " ".join(f"The broker refuses to list the queue {name}: {why}." for name, why in each)


def _repair(
    this: Pass, unseen: set[bytes], *, orphaned: set[bytes], unread: Collection[str]
) -> dict[str, int]:
    """Nothing is repaired in the queues `unread`: what was not seen there may be there."""
    # Not told as missing: what a worker took a moment ago it has not said yet that it holds.
    _mark(this, orphaned, unread)
    missing = _mark(this, unseen - orphaned, unread)
    back = {one for page in published.ids(this, marked=True) for one in page if one not in unseen}
    taken_back = sum(strands.unmark(this, _among(this, chunk)) for chunk in _chunks(back))
    # Where somebody holds a row that was seen again, its mark is still there.
    spared = back if taken_back < len(back) else set()
    rows = strands.past_grace(this).exclude(queue__in=unread)
    lost = rows.exclude(pk__in=strands.uuids(orphaned | spared))
    stuck = rows.filter(pk__in=strands.uuids(orphaned))
    return {
        "missing": missing,
        "stranded": strands.strand(this, lost, after=strands.between_looks(), reason=_LOST),
        "orphaned": strands.strand(this, stuck, after=strands.whole_lease(), reason=_ORPHANED),
    }


def _mark(this: Pass, packed: set[bytes], unread: Collection[str]) -> int:
    marked = 0
    for chunk in _chunks(packed):
        marked += strands.mark(this, _among(this, chunk).exclude(queue__in=unread))
        this.renew()
    return marked


def _among(this: Pass, packed: Iterable[bytes]) -> EntryQuerySet:
    return strands.past_grace(this).filter(pk__in=strands.uuids(packed))


def _chunks(packed: Collection[bytes]) -> Iterator[list[bytes]]:
    rest = iter(sorted(packed))
    return iter(lambda: list(islice(rest, strands.CHUNK)), [])

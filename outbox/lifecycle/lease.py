"""lease: what becomes of a run whose lease nobody renews. Age alone never means dead."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from uuid import UUID

from billiard.exceptions import TimeLimitExceeded
from django.db import connections

from outbox import contact, transitions, workers
from outbox.clock import backoff
from outbox.conf import settings
from outbox.events import Note
from outbox.lifecycle import repair
from outbox.lifecycle.raised import as_stored
from outbox.models import OutboxEntry
from outbox.states import State
from outbox.transitions import Holder
from outbox.worker.runs import CalledOff, TimedOut, Verdict

# The living renew first: nothing is crashed before the server has been up for a whole lease.
_UPTIME = "SELECT EXTRACT(EPOCH FROM STATEMENT_TIMESTAMP() - pg_postmaster_start_time())"


def sweep(*, using: str, dry: bool = False) -> dict[str, int]:
    """Crash the runs whose lease is past, settle the cancelled ones, expire what is too late.

    `dry`: only count them.
    """
    found = {"expired": expire_late(using=using, dry=dry)}
    if database_is_settled(using=using, dry=dry):
        found["crashed"] = crash_lapsed(using=using, dry=dry)
        found["settled"] = settle_abandoned(using=using, dry=dry)
    return found


def database_is_settled(*, using: str, dry: bool = False) -> bool:
    """Whether the living have had a whole lease to renew in, since it was last out of reach."""
    if not dry:
        contact.leave_word(using=using)
    if contact.unbroken_for(using=using) < settings().LEASE:
        return False
    with connections[using].cursor() as cursor:
        cursor.execute(_UPTIME)
        return float(cursor.fetchone()[0]) >= settings().LEASE


def crash_lapsed(*, using: str, dry: bool = False) -> int:
    rows = workers.without_living_owner(OutboxEntry.objects.using(using).lapsed())
    note = Note("sweep", "its lease ran out: the worker is gone")
    return repair.each(rows, partial(crash, note=note), dry=dry)


def crash(entry: OutboxEntry, *, note: Note) -> timedelta | None:
    """Count the crash of a locked entry, by its own limit and its task's word on crashes.

    How long until it is due again; None: it is not.
    """
    configured = settings()
    limit = entry.crash_limit if entry.crash_limit is not None else configured.MAX_CRASHES
    delay = backoff(entry.crashes, first=configured.CRASH_BACKOFF)
    on_crash = entry.options.get("on_crash", "retry")
    to = transitions.crash(entry, delay=delay, limit=limit, on_crash=on_crash, note=note)
    return delay if to is State.PENDING else None


def end_lost_run(
    entry_id: UUID,
    *,
    pid: int,
    owner: UUID,
    verdict: Verdict | None,
    using: str,
) -> timedelta | None:
    """The child that ran it was seen to be gone. By owner and PID: a dying copy harms nobody.

    How long until the entry is due again; None: it is not, by this.
    """
    holder = Holder(owner=owner, pid=pid)
    gone = f"its child {pid} is gone"
    again: timedelta | None = None
    if isinstance(verdict, TimedOut):
        again = _time_out(entry_id, holder=holder, verdict=verdict, using=using)
    elif isinstance(verdict, CalledOff):
        note = Note("clerk", f"{gone}: the worker called it off")
        if transitions.release(entry_id, holder=holder, note=note, using=using):
            again = timedelta()
    else:
        with transitions.lost_run(entry_id, holder=holder, using=using) as entry:
            if entry is not None:
                again = crash(entry, note=Note("clerk", gone))
    transitions.settle(entry_id, holder=holder, note=Note("clerk", gone), using=using)
    return again


def _time_out(entry_id: UUID, *, holder: Holder, verdict: TimedOut, using: str) -> timedelta | None:
    exception = as_stored(TimeLimitExceeded(verdict.limit))
    note = Note("clerk", error=f"TimeLimitExceeded: {verdict.limit:g} seconds", exception=exception)
    to = transitions.time_out(
        entry_id,
        holder=holder,
        delay=verdict.delay,
        budget=verdict.budget,
        note=note,
        using=using,
    )
    return verdict.delay if to is State.PENDING else None


def settle_abandoned(*, using: str, dry: bool = False) -> int:
    rows = workers.without_living_owner(OutboxEntry.objects.using(using).abandoned())
    note = Note("sweep", "its run's lease ran out")
    return repair.each(rows, partial(transitions.settle_locked, note=note), dry=dry)


def expire_late(*, using: str, dry: bool = False) -> int:
    rows = OutboxEntry.objects.using(using).too_late()
    return repair.each(rows, _expire, dry=dry)


def _expire(entry: OutboxEntry) -> State:
    return transitions.expire(entry, note=Note("sweep", why_late(entry)))


def why_late(entry: OutboxEntry) -> str:
    if entry.expires_at is not None and (
        entry.deadline_at is None or entry.expires_at <= entry.deadline_at
    ):
        return f"it expired at {entry.expires_at:%Y-%m-%d %H:%M:%S %Z} before it started"
    return f"its retry deadline was {entry.deadline_at:%Y-%m-%d %H:%M:%S %Z}"

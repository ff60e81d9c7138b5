"""What people do to entries besides cancelling them: requeue, resolve, run now, erase."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from outbox import payload, transitions
from outbox.conf import default_database, in_range, settings
from outbox.errors import MisuseError, PayloadError
from outbox.events import Note
from outbox.lifecycle.cancel import as_id, cancel
from outbox.models import OutboxEntry


def requeue(entry_id: UUID | str, *, actor: str, reason: str = "", using: str = "") -> bool:
    """Owe a failed or cancelled entry again, under its ID, with a new retry budget.

    False: it is in another state, its old run still goes on, or its unique key is another's now.
    """
    using = using or default_database()
    found = OutboxEntry.objects.using(using).filter(pk=as_id(entry_id)).only("options").first()
    if found is None:
        return False
    budget = _crash_budget(found.options)
    return transitions.requeue(found.pk, note=Note(actor, reason), crash_budget=budget, using=using)


def _crash_budget(options: Any) -> int:
    """The task's own, where that is a number: anybody's plain SQL may have written the row."""
    own: Any = options.get("max_crashes") if isinstance(options, dict) else None
    return int(own) if in_range(own, int) else settings().MAX_CRASHES


def resolve(
    entry_id: UUID | str,
    *,
    effect: str | None = None,
    happened: bool,
    result: Any = None,
    actor: str,
    reason: str = "",
    using: str = "",
) -> bool:
    """A person's word on an uncertain entry: it happened (with a result), or it did not.

    With `effect`, that effect is settled and the body runs again, past it. Without, for an entry
    parked after a crash: happened ends it as succeeded, not happened runs it again.

    False: it is not uncertain, it has no such unsettled effect, or it has some and none is named.

    Raises:
        MisuseError: `happened` is neither True nor False.
        PayloadError: the result cannot be stored.
    """
    _check_word(happened, result)
    return transitions.resolve(
        as_id(entry_id),
        effect=effect,
        happened=happened,
        result=result,
        note=Note(actor, reason),
        using=using or default_database(),
    )


def settle_effect(
    key: str, *, happened: bool, result: Any = None, actor: str, using: str = ""
) -> bool:
    """A person's word on an effect that a command or a script has begun, by its key.

    False: there is none, or it is settled. An entry's effect is settled by `resolve`.

    Raises:
        MisuseError: `happened` is neither True nor False.
        PayloadError: the result cannot be stored.
    """
    _check_word(happened, result)
    return transitions.settle_own_effect(
        key, happened=happened, result=result, actor=actor, using=using or default_database()
    )


def _check_word(happened: Any, result: Any) -> None:
    if not isinstance(happened, bool):
        raise MisuseError(f"happened={happened!r:.80} is no answer: it takes True or False.")
    most = settings().MAX_PAYLOAD_BYTES
    if len(payload.dumps(result).encode()) > most:
        raise PayloadError(f"The result is larger than OUTBOX['MAX_PAYLOAD_BYTES'], {most:,}.")


def run_now(entry_id: UUID | str, *, actor: str, using: str = "") -> bool:
    """Make a pending entry due now. False: it is not pending."""
    return transitions.run_now(as_id(entry_id), note=Note(actor), using=using or default_database())


def erase(*, subject: str, actor: str, using: str = "") -> int:
    """Remove what the entries about `subject` say; open ones are cancelled first. How many.

    What was erased cannot be requeued. The messages that are owed to owners stay: they hold IDs.
    """
    using = using or default_database()
    rows = OutboxEntry.objects.using(using).filter(subject=subject)
    rows = rows.exclude(task=transitions.TELL_OWNER)
    erased = 0
    for entry in rows.only("status", "options").order_by("pk"):
        if not entry.is_final:
            cancel(entry.pk, actor=actor, reason="erased", using=using)
        erased += transitions.erase(entry.pk, note=Note(actor), using=using)
    return erased

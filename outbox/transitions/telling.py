"""How a message to an owner is told: it takes the notices, is sent, and says that it was."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from django.db import transaction
from django.db.models import QuerySet
from django.db.models.functions import Now

from outbox.models import OutboxEntry, OutboxNotice
from outbox.transitions.moves import held
from outbox.transitions.notices import owe_messages, untold
from outbox.transitions.repairs import short_of_patience


def take_notices(entry_id: UUID, *, token: UUID, owner: str, using: str) -> QuerySet[OutboxNotice]:
    """What the message of this entry tells: at every attempt the very same.

    None of it, where the run no longer owns the entry, or has told it.
    """
    mine = OutboxNotice.objects.using(using).filter(told_by=entry_id)
    with transaction.atomic(using=using):
        if held(entry_id, token=token, using=using) is None:
            return mine.none()
        if not mine.exists():
            untold(using=using).filter(owner=owner).update(told_by=entry_id)
    return mine.filter(told_at__isnull=True)


def note_told(entry_id: UUID, *, token: UUID, owner: str, using: str) -> None:
    """The message was sent, or there is nobody to send it to; what has come since is owed anew.

    The key is let go here and not at the end of the run: the next message needs it, and must be
    owed by the same commit that says when the last one was.
    """
    notices = OutboxNotice.objects.using(using).filter(told_by=entry_id, told_at__isnull=True)
    with transaction.atomic(using=using):
        entry = held(entry_id, token=token, using=using)
        notices.update(told_at=Now())  # by a late run too: it was sent
        if entry is None:
            return
        OutboxEntry.objects.using(using).filter(pk=entry_id).update(unique_key=None)
        if untold(using=using).filter(owner=owner).exists():
            owe_messages({owner: entry.queue}, using=using)


def owe_untold(owners: Iterable[str], *, queue: str, using: str) -> None:
    """Owe these owners the message that whoever noted something for them took to be on its way."""
    with short_of_patience(using=using):
        owe_messages(dict.fromkeys(owners, queue), using=using)

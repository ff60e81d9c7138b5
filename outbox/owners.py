"""Telling an entry's named owner, by e-mail, what ended badly or waits for a person."""

from __future__ import annotations

import logging

from django.core.mail import EmailMessage

from outbox.conf import settings
from outbox.models import OutboxEntry

logger = logging.getLogger("outbox")


def tell(entry_id: str, *, owner: str, using: str) -> None:
    """Send one message about the entry to the owner's addresses.

    Raises:
        OSError: the mail could not be handed over.
    """
    addresses = list(settings().OWNERS.get(owner, ()))
    entry = OutboxEntry.objects.using(using).filter(pk=entry_id).first()
    if entry is None or not addresses:
        logger.warning("outbox.owner.unknown owner=%s entry_id=%s", owner, entry_id)
        return
    EmailMessage(subject=_subject(entry), body=_body(entry, owner=owner), to=addresses).send()


def _subject(entry: OutboxEntry) -> str:
    about = f" for {entry.subject}" if entry.subject else ""
    return f"[outbox] {entry.task}{about}: {entry.status}"


def _body(entry: OutboxEntry, *, owner: str) -> str:
    return (
        f"{entry.task} is now {entry.status}. You are told as its owner, {owner}.\n\n"
        f"Job      {entry.pk}\n"
        f"Subject  {entry.subject or '-'}\n"
        f"Attempts {entry.attempts} ({entry.failures} failures, {entry.crashes} crashes)\n"
        f"Error    {entry.error or '-'}\n\n"
        "Every attempt with its traceback is in the admin, where it can be retried or cancelled.\n"
    )

"""Telling an entry's named owner, by e-mail, what ended badly, waits for a person, or is old."""

from __future__ import annotations

import logging
from collections.abc import Callable

from django.core.mail import EmailMessage

from outbox.conf import settings
from outbox.models import OutboxEntry
from outbox.words import counted

logger = logging.getLogger("outbox")

#: The subject and the body of a message about an entry.
Words = Callable[[OutboxEntry], tuple[str, str]]


def tell(entry_id: str, *, owner: str, using: str) -> None:
    """Send one message about the entry to the owner's addresses.

    Raises:
        OSError: the mail could not be handed over.
    """
    _send(entry_id, lambda entry: _standing(entry, owner=owner), owner=owner, using=using)


def tell_over_age(entry_id: str, *, count: int, owner: str, using: str) -> None:
    """Send one message about `count` entries of a task, of which that one is the oldest.

    Raises:
        OSError: the mail could not be handed over.
    """
    _send(entry_id, lambda entry: _old(entry, count, owner=owner), owner=owner, using=using)


def _send(entry_id: str, words: Words, *, owner: str, using: str) -> None:
    addresses = list(settings().OWNERS.get(owner, ()))
    entry = OutboxEntry.objects.using(using).filter(pk=entry_id).first()
    if entry is None or not addresses:
        logger.warning("outbox.owner.unknown owner=%s entry_id=%s", owner, entry_id)
        return
    subject, body = words(entry)
    EmailMessage(subject=subject, body=body, to=addresses).send()


def _standing(entry: OutboxEntry, *, owner: str) -> tuple[str, str]:
    about = f" for {entry.subject}" if entry.subject else ""
    return f"[outbox] {entry.task}{about}: {entry.status}", (
        f"{entry.task} is now {entry.status}. You are told as its owner, {owner}.\n\n"
        f"{_facts(entry)}\n"
        "Every attempt with its traceback is in the admin, where it can be retried or cancelled.\n"
    )


def _old(entry: OutboxEntry, count: int, *, owner: str) -> tuple[str, str]:
    entries = counted(count, "entry", "entries")
    have = "has" if count == 1 else "have"
    return f"[outbox] {entry.task}: {entries} over age", (
        f"{entries} of {entry.task} {have} been owed for longer than allowed. You are told once of "
        f"each, as their owner, {owner}. Nothing is pushed again by being old.\n\n"
        f"The oldest has been due since {entry.due_at:%Y-%m-%d %H:%M:%S %Z}, and is now "
        f"{entry.status}:\n\n"
        f"{_facts(entry)}\n"
        "The admin has them under Unfinished; manage.py outbox_status says what holds them up.\n"
    )


def _facts(entry: OutboxEntry) -> str:
    return (
        f"Job      {entry.pk}\n"
        f"Subject  {entry.subject or '-'}\n"
        f"Attempts {entry.attempts} ({entry.failures} failures, {entry.crashes} crashes)\n"
        f"Error    {entry.error or '-'}\n"
    )

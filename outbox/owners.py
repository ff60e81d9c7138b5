"""Telling an entry's named owner, by e-mail, what ended badly, waits for a person, or is old."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from django.core.mail import EmailMessage

from outbox.conf import settings
from outbox.models import OutboxEntry
from outbox.words import counted

logger = logging.getLogger("outbox")

#: The subject and the body of a message about an entry.
Words = Callable[[OutboxEntry], tuple[str, str]]


def tell(entry_id: str, *, owner: str, using: str) -> None:
    """Send one message about the entry to the owner's addresses, or else the default owner's.

    Raises:
        OSError: the mail could not be handed over.
    """
    _send(entry_id, _standing, owner=owner, using=using)


def tell_over_age(entry_id: str, *, count: int, owner: str, using: str) -> None:
    """Send one message about `count` entries of a task, of which that one is the oldest.

    Raises:
        OSError: the mail could not be handed over.
    """
    _send(entry_id, partial(_old, count=count), owner=owner, using=using)


def _send(entry_id: str, words: Words, *, owner: str, using: str) -> None:
    addresses, told = _addresses(owner)
    entry = OutboxEntry.objects.using(using).filter(pk=entry_id).first()
    if entry is None or told != owner or not addresses:
        logger.warning("outbox.owner.unknown owner=%s entry_id=%s", owner, entry_id)
    if entry is None or not addresses:
        return
    subject, body = words(entry)
    EmailMessage(subject=subject, body=body + _why(owner, told), to=addresses).send()


def _addresses(owner: str) -> tuple[list[str], str]:
    """Where to write, and whose addresses these are: the default owner's where it has none."""
    known = settings().OWNERS
    told = owner if known.get(owner) else settings().DEFAULT_OWNER
    return list(known.get(told, ())), told


def _why(owner: str, told: str) -> str:
    if told == owner:
        return f"\nYou are told as the owner, {owner}.\n"
    return (
        f"\nYou are told as the default owner, {told}: OUTBOX['OWNERS'] has no address of the "
        f"owner, {owner}.\n"
    )


def _standing(entry: OutboxEntry) -> tuple[str, str]:
    about = f" for {entry.subject}" if entry.subject else ""
    return f"[outbox] {entry.task}{about}: {entry.status}", (
        f"{entry.task} is now {entry.status}.\n\n"
        f"{_facts(entry)}\n"
        "Every attempt with its traceback is in the admin, where it can be retried or cancelled.\n"
    )


def _old(entry: OutboxEntry, *, count: int) -> tuple[str, str]:
    entries = counted(count, "entry", "entries")
    have = "has" if count == 1 else "have"
    return f"[outbox] {entry.task}: {entries} over age", (
        f"{entries} of {entry.task} {have} been owed for longer than allowed. You are told once of "
        "each. Nothing is pushed again by being old.\n\n"
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

"""Telling an entry's named owner, by e-mail, what ended badly, waits for a person, or is old."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parseaddr
from typing import Any
from uuid import UUID

from django.conf import settings as django_settings
from django.core.mail import EmailMessage
from django.db.models import Count, QuerySet

from outbox import transitions
from outbox.conf import settings
from outbox.lifecycle.claim import Claim
from outbox.models import OutboxEntry, OutboxNotice
from outbox.words import counted, shortened

logger = logging.getLogger("outbox")

SHOWN = 10  # entries of each group by name; of the others the number
_LONGEST_LINE = 200  # characters of a subject or an error

#: What a notice is about → what one entry does, what several do.
_KINDS: Mapping[str, tuple[str, str]] = {
    "failed": ("failed", "failed"),
    "uncertain": ("waits for a person", "wait for a person"),
    "over_age": ("over age", "over age"),
}
_IN_THE_ADMIN = (
    "Every attempt with its traceback is in the admin, where it can be retried or cancelled.\n"
)
_UNFINISHED = (
    "The admin has them under Unfinished; manage.py outbox_status says what holds them up.\n"
)


@dataclass(frozen=True)
class Group:
    """So many entries of a task to which the same has happened."""

    about: str
    task: str
    count: int


def tell(claim: Claim, *, owner: str) -> None:
    """Send what the owner is to be told, as one message, to their addresses or the default owner's.

    A repetition is the same mail: it tells of the same entries, under the same Message-ID.

    Raises:
        OSError: the mail could not be handed over.
    """
    whose: dict[str, Any] = {"token": claim.token, "owner": owner, "using": claim.using}
    notices = transitions.take_notices(claim.id, **whose)
    groups = _groups(notices)
    if groups:
        first = _entries(notices, groups[0])[0]
        alone = sum(group.count for group in groups) == 1
        words = _one(first, groups[0].about) if alone else _several(notices, groups)
        _send(*words, owner=owner, entry_id=first.pk, message_id=_message_id(claim.id))
    transitions.note_told(claim.id, **whose)


def tell_of_one(entry_id: str, owner: str, using: str, *, over_age: int = 0) -> None:
    """Send a message about that entry, or about `over_age` of its task, of which it is the oldest.

    Raises:
        OSError: the mail could not be handed over.
    """
    entry = OutboxEntry.objects.using(using).filter(pk=entry_id).first()
    if entry is None:
        logger.warning("outbox.owner.unknown owner=%s entry_id=%s", owner, entry_id)
        return
    words = _old(entry, count=over_age) if over_age else _standing(entry)
    _send(*words, owner=owner, entry_id=entry.pk)


def _send(subject: str, body: str, *, owner: str, entry_id: UUID, message_id: str = "") -> None:
    """To nobody, where there are no addresses: the log says so, once."""
    addresses, told = _addresses(owner)
    if told != owner or not addresses:
        logger.warning("outbox.owner.unknown owner=%s entry_id=%s", owner, entry_id)
    if not addresses:
        return
    headers = {"Message-ID": message_id} if message_id else {}
    body += _why(owner, told)
    EmailMessage(_line(subject), body, to=addresses, headers=headers).send()


def _message_id(entry_id: UUID) -> str:
    """The same for every attempt, on whatever host."""
    domain = parseaddr(django_settings.DEFAULT_FROM_EMAIL)[1].rpartition("@")[2]
    return f"<{entry_id}@{domain or 'localhost'}>"


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


# --- several entries ------------------------------------------------------------------------------


def _groups(notices: QuerySet[OutboxNotice]) -> list[Group]:
    """By what has happened, the worst first, and by task; an entry counts once in each."""
    found = notices.values_list("about", "entry__task").annotate(Count("entry", distinct=True))
    order = list(_KINDS)
    return sorted((Group(*row) for row in found), key=lambda it: (order.index(it.about), it.task))


def _entries(notices: QuerySet[OutboxNotice], group: Group) -> Sequence[OutboxEntry]:
    """The first of them."""
    about = notices.filter(about=group.about).values("entry")
    rows = OutboxEntry.objects.using(notices.db).filter(pk__in=about, task=group.task)
    return list(rows.order_by("pk")[:SHOWN])


def _several(notices: QuerySet[OutboxNotice], groups: Sequence[Group]) -> tuple[str, str]:
    parts = [_part(notices, group) for group in groups]
    if any(group.about != "over_age" for group in groups):
        parts.append(_IN_THE_ADMIN)
    if any(group.about == "over_age" for group in groups):
        parts.append(f"Nothing is pushed again by being old. {_UNFINISHED}")
    return f"[outbox] {', '.join(_counts(groups))}", "\n".join(parts)


def _counts(groups: Sequence[Group]) -> Iterator[str]:
    totals = {about: sum(it.count for it in groups if it.about == about) for about in _KINDS}
    happened = [(about, total) for about, total in totals.items() if total]
    for place, (about, total) in enumerate(happened):
        yield _what(about, total, noun=not place)


def _what(about: str, count: int, *, noun: bool = True) -> str:
    """`1,000 entries failed`, or without the noun `2 wait for a person`."""
    number = counted(count, "entry", "entries") if noun else f"{count:,}"
    return f"{number} {_KINDS[about][count != 1]}"


def _part(notices: QuerySet[OutboxNotice], group: Group) -> str:
    """What has happened to a task's entries, and the first of them."""
    lines = [_listed(entry, about=group.about) for entry in _entries(notices, group)]
    more = group.count - len(lines)
    rest = [f"  and {more:,} more"] if more > 0 else []
    heading = f"{_line(group.task)}: {_what(group.about, group.count)}"
    return "\n".join([heading, "", *lines, *rest, ""])


def _listed(entry: OutboxEntry, *, about: str) -> str:
    """An entry on a line of its own; how it stands now, where that is no longer what happened."""
    texts = [str(entry.pk), _subject(entry), _line(entry.error.partition("\n")[0])]
    now = f"(now {entry.status})" if entry.status != about else ""
    return "  " + "  ".join(filter(None, [*texts, now]))


# --- one entry ------------------------------------------------------------------------------------


def _one(entry: OutboxEntry, about: str) -> tuple[str, str]:
    return _old(entry, count=1) if about == "over_age" else _standing(entry)


def _standing(entry: OutboxEntry) -> tuple[str, str]:
    about = f" for {subject}" if (subject := _subject(entry)) else ""
    return f"[outbox] {entry.task}{about}: {entry.status}", (
        f"{entry.task} is now {entry.status}.\n\n{_facts(entry)}\n{_IN_THE_ADMIN}"
    )


def _old(entry: OutboxEntry, *, count: int) -> tuple[str, str]:
    entries = counted(count, "entry", "entries")
    have = "has" if count == 1 else "have"
    return f"[outbox] {entry.task}: {entries} over age", (
        f"{entries} of {entry.task} {have} been owed for longer than allowed. You are told once of "
        "each. Nothing is pushed again by being old.\n\n"
        f"The oldest has been due since {entry.due_at:%Y-%m-%d %H:%M:%S %Z}, and is now "
        f"{entry.status}:\n\n"
        f"{_facts(entry)}\n{_UNFINISHED}"
    )


def _facts(entry: OutboxEntry) -> str:
    return (
        f"Job      {entry.pk}\n"
        f"Subject  {_subject(entry) or '-'}\n"
        f"Attempts {entry.attempts} ({entry.failures} failures, {entry.crashes} crashes)\n"
        f"Error    {entry.error or '-'}\n"
    )


def _subject(entry: OutboxEntry) -> str:
    """Of an erased entry nothing is said: whom it was about was what had to be forgotten."""
    return "(erased)" if entry.is_erased else _line(entry.subject)


def _line(text: str) -> str:
    """On one line: a header must be, and a list is read as such."""
    return shortened(" ".join(text.split()), _LONGEST_LINE)

"""What the commands share about people: who asks, which entries are meant, and the answer."""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterable
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError, CommandParser

from outbox.bulk import Outcome
from outbox.lifecycle.cancel import as_id
from outbox.management.databases import aliases_of, reachable
from outbox.models import OutboxEntry


def add_choice(parser: CommandParser, *, subject_means: str) -> None:
    """The arguments that choose entries: their IDs, or what they are about."""
    parser.add_argument("ids", nargs="*", metavar="ID", help="an entry's ID (Celery's task ID)")
    parser.add_argument("--subject", help=f"{subject_means} about this, such as shop.order:42")
    parser.add_argument("--reason", default="", help="why, for the entry's history")
    parser.add_argument("--database", help="the alias; the first of OUTBOX['DATABASES'] by default")


def chosen_database(database: str | None) -> str:
    """The alias meant, once it can be used.

    Raises:
        CommandError: no such alias, or it cannot be reached; in one sentence.
    """
    using = next(iter(aliases_of(database)))
    reachable([using])
    return using


def chosen(
    ids: Iterable[str], *, subject: str | None, states: Iterable[str], using: str
) -> list[UUID]:
    """The IDs given, or those of the entries about `subject` that are in one of `states`.

    Raises:
        CommandError: neither or both are given, an ID is none, or nothing is found.
    """
    given = [_id(text) for text in ids]
    if bool(given) == bool(subject):
        raise CommandError("Give the IDs of entries, or --subject.")
    if not subject:
        return given
    rows = OutboxEntry.objects.using(using).filter(subject=subject, status__in=list(states))
    found = list(rows.order_by("pk").values_list("pk", flat=True))
    if not found:
        raise CommandError(f"No entry about {subject!r} is {' or '.join(sorted(states))}.")
    return found


def _id(text: str) -> UUID:
    try:
        return as_id(text)
    except ValueError as error:
        raise CommandError(f"{text!r} is not an entry's ID, which is a UUID.") from error


def actor() -> str:
    """Who runs the command, by the operating system's name."""
    try:
        return f"command:{getpass.getuser()}"
    except (KeyError, OSError):  # a container's user without a name
        return f"command:{os.getuid()}"


def answer(command: BaseCommand, outcomes: Iterable[Outcome], *, done: str) -> None:
    """Say for each entry what happened.

    Raises:
        CommandError: one or more were refused.
    """
    outcomes = list(outcomes)
    for outcome in outcomes:
        words = f"refused: {outcome.refused}" if outcome.refused else done
        command.stdout.write(f"{outcome.entry_id}  {words}")
    if refused := sum(bool(outcome.refused) for outcome in outcomes):
        raise CommandError(f"{refused} of {len(outcomes)} refused.")

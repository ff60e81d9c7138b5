"""`manage.py outbox_requeue`: owe ended entries again."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from outbox import bulk
from outbox.management.answers import actor, add_choice, answer, chosen, chosen_database
from outbox.states import State


class Command(BaseCommand):
    help = (
        "Retry failed or cancelled entries, under their IDs and with a new retry budget. Exit "
        "status 1 when any was refused."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        # What somebody cancelled is retried by its ID only, never along with the others.
        add_choice(parser, subject_means="instead of IDs: the failed entries")

    def handle(
        self, *, ids: list[str], subject: str | None, reason: str, database: str | None, **_: Any
    ) -> None:
        using = chosen_database(database)
        entries = chosen(ids, subject=subject, states={State.FAILED}, using=using)
        outcomes = bulk.requeue(entries, actor=actor(), reason=reason, using=using)
        answer(self, outcomes, done="owed again")

"""`manage.py outbox_cancel`: entries that shall not run, or not again."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from outbox import bulk
from outbox.management.answers import actor, add_choice, answer, chosen, chosen_database
from outbox.states import OPEN


class Command(BaseCommand):
    help = (
        "Cancel entries that have not ended. A run that goes on is not interrupted unless "
        "--terminate is given; its end is discarded. Exit status 1 when any was refused."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        add_choice(parser, subject_means="instead of IDs: the unfinished entries")
        parser.add_argument(
            "--terminate", action="store_true", help="also kill the child that runs it"
        )

    def handle(
        self,
        *,
        ids: list[str],
        subject: str | None,
        reason: str,
        terminate: bool,
        database: str | None,
        **_: Any,
    ) -> None:
        using = chosen_database(database)
        entries = chosen(ids, subject=subject, states=OPEN, using=using)
        outcomes = bulk.cancel(
            entries, actor=actor(), reason=reason, terminate=terminate, using=using
        )
        answer(self, outcomes, done="cancelled")

"""`manage.py outbox_prune`: delete ended entries whose retention is past."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from outbox import maintenance
from outbox.management.databases import aliases_of, reachable
from outbox.words import counted


class Command(BaseCommand):
    help = "Delete ended entries, with their events, after their retention (OUTBOX['RETENTION'])."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", help="only this alias, instead of OUTBOX['DATABASES']")

    def handle(self, *, database: str | None, **options: Any) -> None:
        aliases = aliases_of(database)
        reachable(aliases)
        for using in aliases:
            found = maintenance.prune(using=using)
            if found is None:
                raise CommandError("Another process is pruning at this moment; nothing done.")
            if "failed" in found:
                raise CommandError(f"Nothing more was deleted: {found['failed']}")
            self.stdout.write(f"{counted(found['pruned'], 'entry', 'entries')} deleted")

"""`manage.py outbox_dispatcher`: publish what is due, without celery-beat."""

from __future__ import annotations

from typing import Any

from celery import current_app
from django.core.management.base import BaseCommand, CommandError, CommandParser

from outbox import maintenance
from outbox.dispatcher import Dispatcher
from outbox.management.databases import aliases_of, reachable


class Command(BaseCommand):
    help = "Publish due entries and recover those whose worker died, until stopped (SIGTERM)."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--once", action="store_true", help="one pass, then exit")
        parser.add_argument("--database", help="only this alias, instead of OUTBOX['DATABASES']")

    def handle(self, *, once: bool, database: str | None, **options: Any) -> None:
        aliases = aliases_of(database)
        reachable(aliases)
        if not once:
            Dispatcher(current_app, aliases).run()
            return
        for using in aliases:
            found = maintenance.dispatch(current_app, using=using)
            if "broker" in found:
                raise CommandError(f"{found['broker']} The entries stay pending; nothing is lost.")
            if "failed" in found:
                raise CommandError(f"A part of the pass failed: {found['failed']}")
            self.stdout.write(", ".join(f"{name} {count}" for name, count in found.items()))

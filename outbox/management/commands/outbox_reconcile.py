"""`manage.py outbox_reconcile`: compare the database with the broker and repair, once."""

from __future__ import annotations

import json
from typing import Any

from celery import current_app
from django.core.management.base import BaseCommand, CommandError, CommandParser

from outbox import maintenance
from outbox.brokers import ping
from outbox.management.databases import aliases_of, reachable
from outbox.ticks import Found


class Command(BaseCommand):
    help = (
        "Recover runs whose worker died, and publish again what the broker has lost: one pass. A "
        "lost message is repaired by the second pass that misses it."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--format", choices=["text", "json"], default="text")
        parser.add_argument("--database", help="only this alias, instead of OUTBOX['DATABASES']")

    def handle(self, *, format: str, database: str | None, **options: Any) -> None:
        aliases = aliases_of(database)
        reachable(aliases)
        if why := ping.why_unreachable(current_app):
            raise CommandError(f"The broker does not answer: {why} Nothing was repaired.")
        for using in aliases:
            found = _reconcile(using)
            self.stdout.write(json.dumps(dict(found)) if format == "json" else _words(found))


def _reconcile(using: str) -> Found:
    found = maintenance.reconcile(current_app, using=using)
    if found is None:
        raise CommandError("Another process is reconciling at this moment; nothing done.")
    if found["broker"]:
        raise CommandError(f"{found['broker']} Lost messages were not looked for.")
    return found


def _words(found: Found) -> str:
    counts = {name: count for name, count in found.items() if name != "broker"}
    return ", ".join(f"{name} {count}" for name, count in counts.items())

"""`manage.py outbox_reconcile`: compare database, broker and result store, and repair, once."""

from __future__ import annotations

import json
from typing import Any

from celery import current_app
from django.core.management.base import BaseCommand, CommandError, CommandParser

from outbox import maintenance
from outbox.brokers import ping
from outbox.management.databases import aliases_of, reachable
from outbox.ticks import Found

# What a pass may have to say beside its counts.
_TEXTS = ("broker", "skipped", "unlisted", "results")


class Command(BaseCommand):
    help = (
        "Recover runs whose worker died, publish again what the broker has lost, and correct "
        "results that say other than the entries: one pass. A lost message is repaired by the "
        "second pass that misses it."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--format", choices=["text", "json"], default="text")
        parser.add_argument("--dry-run", action="store_true", help="say what it would do, only")
        parser.add_argument(
            "--remove-resurrected",
            action="store_true",
            help="take the messages of entries that have ended out of the queues",
        )
        parser.add_argument("--database", help="only this alias, instead of OUTBOX['DATABASES']")

    def handle(self, *, format: str, database: str | None, **options: Any) -> None:
        aliases = aliases_of(database)
        reachable(aliases)
        if why := ping.why_unreachable(current_app):
            raise CommandError(f"The broker does not answer: {why} Nothing was repaired.")
        maintenance.know_tasks(current_app)
        dry, remove = options["dry_run"], options["remove_resurrected"]
        for using in aliases:
            found = _reconcile(using, dry=dry, remove=remove)
            said = {"database": using, "dry_run": dry, **found}
            self.stdout.write(json.dumps(said) if format == "json" else _words(found, dry=dry))


def _reconcile(using: str, *, dry: bool, remove: bool) -> Found:
    if dry:
        found: Found | None = maintenance.would_reconcile(current_app, using=using, remove=remove)
    else:
        found = maintenance.reconcile(current_app, using=using, anew=True, remove=remove)
    if found is None:
        raise CommandError("Another process is reconciling at this moment; nothing done.")
    if found["broker"]:
        raise CommandError(f"{found['broker']} Lost messages were not looked for.")
    return found


def _words(found: Found, *, dry: bool) -> str:
    counts = ", ".join(f"{name} {count}" for name, count in found.items() if name not in _TEXTS)
    said = [found[name] for name in _TEXTS if found[name]]
    return "\n".join([f"Nothing was changed. It would be: {counts}" if dry else counts, *said])

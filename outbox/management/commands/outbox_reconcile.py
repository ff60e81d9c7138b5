"""`manage.py outbox_reconcile`: compare database, broker and result store, and repair, once."""

from __future__ import annotations

import json
from typing import Any

from celery import current_app
from django.core.management.base import BaseCommand, CommandError, CommandParser

from outbox import maintenance
from outbox.management.databases import aliases_of, reachable
from outbox.ticks import Found

# What a pass may have to say beside its counts and what fails the command.
_TEXTS = ("skipped", "unlisted", "results")


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
        maintenance.know_tasks(current_app)
        dry, remove = options["dry_run"], options["remove_resurrected"]
        left: list[str] = []
        for using in aliases:
            found = _reconcile(using, dry=dry, remove=remove)
            said = {"database": using, "dry_run": dry, **found}
            self.stdout.write(json.dumps(said) if format == "json" else _words(found, dry=dry))
            if found["broker"]:
                left.append(f"{found['broker']} Lost messages were not looked for.")
            if found["failed"]:
                left.append(f"A part of the pass failed: {found['failed']}")
        if left:
            raise CommandError(" ".join(left))


def _reconcile(using: str, *, dry: bool, remove: bool) -> Found:
    app = current_app
    try:
        if dry:
            found: Found | None = maintenance.would_reconcile(app, using=using, remove=remove)
        else:
            found = maintenance.reconcile(app, using=using, anew=True, remove=remove)
    except maintenance.AWAY as error:
        reason = " ".join(str(error).split())
        raise CommandError(
            f"The database {using!r} went away: {reason}. What was repaired stays so; run it again."
        ) from error
    if found is None:
        raise CommandError("Another process is reconciling at this moment; run it again.")
    return found


def _words(found: Found, *, dry: bool) -> str:
    counts = ", ".join(f"{name} {count}" for name, count in found.items() if isinstance(count, int))
    said = [found[name] for name in _TEXTS if found[name]]
    return "\n".join([f"Nothing was changed. It would be: {counts}" if dry else counts, *said])

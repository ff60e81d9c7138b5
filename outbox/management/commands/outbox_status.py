"""`manage.py outbox_status`: healthy, or what is wrong and what to do next."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from celery import current_app
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, InterfaceError

from outbox import standing, status
from outbox.management.databases import aliases_of, reachable
from outbox.outage import is_outage
from outbox.states import FINAL, State
from outbox.status import Status
from outbox.words import counted, span


class Command(BaseCommand):
    help = (
        "Show how the outbox is doing. Exit status: 0 when healthy, 1 when not. Ended entries are "
        f"counted up to {standing.LOOKED_AT:,} of each state, so that it stays quick."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--format", choices=["text", "json"], default="text")
        parser.add_argument("--database", help="only this alias, instead of OUTBOX['DATABASES']")

    def handle(self, *, format: str, database: str | None, **options: Any) -> None:
        aliases = aliases_of(database)
        if format == "json" and len(aliases) > 1:
            raise CommandError("The JSON is about one database: name it with --database.")
        reachable(aliases)
        found = {using: _read(using) for using in aliases}
        for using, seen in found.items():
            lines = [json.dumps(seen.as_json())] if format == "json" else _lines(using, seen)
            self.stdout.write("\n".join(lines))
        if not all(seen.healthy for seen in found.values()):
            sys.exit(1)


def _read(using: str) -> Status:
    try:
        return status.read(current_app, using=using)
    except (DatabaseError, InterfaceError) as error:
        reason = " ".join(str(error).split())
        what = "did not answer" if is_outage(error) else "refused the question"
        raise CommandError(f"The database {using!r} {what}: {reason}") from error


def _lines(using: str, seen: Status) -> Iterator[str]:
    count = len(seen.problems)
    verdict = "healthy" if seen.healthy else counted(count, "problem")
    yield f"Outbox in {using!r} at {seen.at:%Y-%m-%d %H:%M:%S %Z}: {verdict}"
    for problem in seen.problems:
        yield f"  ! {problem.message}  [{problem.code}]"
    yield from ("", *_counts(seen), "", *_queues(seen), "", *_workers(seen), "", *_ticks(seen))


def _counts(seen: Status) -> Iterator[str]:
    yield from _table(["state", "entries"], [[state, _count(seen, state)] for state in State])
    yield ""
    yield f"  oldest unfinished: {_span(seen.oldest_unfinished_seconds)}"
    yield f"  oldest published:  {_span(seen.oldest_published_seconds)}"
    if seen.oldest_uncertain_seconds is not None:
        yield f"  oldest uncertain:  {_span(seen.oldest_uncertain_seconds)}"


def _count(seen: Status, state: State) -> str:
    count = seen.counts[state]
    is_cut = state in FINAL and count >= standing.LOOKED_AT
    return f"{count:,} or more" if is_cut else f"{count:,}"


def _queues(seen: Status) -> Iterator[str]:
    head = ["queue", "pending", "due", "published", "running", "oldest due"]
    rows = [
        [
            queue.name,
            *(f"{n:,}" for n in (queue.pending, queue.due, queue.published, queue.running)),
            _span(queue.oldest_due_seconds),
        ]
        for queue in seen.queues
    ]
    yield from _table(head, rows) if rows else ["  no queue has open entries"]


def _workers(seen: Status) -> Iterator[str]:
    yield f"  live workers: {seen.workers:,}"
    if seen.refused:
        yield f"  deliveries that they did not run: {_found(seen.refused)}"


def _ticks(seen: Status) -> Iterator[str]:
    rows = [
        [
            tick.name,
            _ago(seen.at, tick.last_at),
            "-" if tick.duration_seconds is None else f"{tick.duration_seconds:.3f} s",
            _found(tick.findings) or "-",
        ]
        for tick in seen.ticks
    ]
    yield from _table(["tick", "last run", "took", "found"], rows)


def _found(findings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in findings.items() if value != "")


def _ago(at: datetime, moment: datetime | None) -> str:
    return "never" if moment is None else f"{_span((at - moment).total_seconds())} ago"


def _span(seconds: float | None) -> str:
    return "-" if seconds is None else span(seconds)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns under each other: words to the left, numbers to the right."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    right = [all(row[column][:1].isdigit() for row in rows) for column in range(len(head))]
    for line in lines:
        cells = [
            text.rjust(width) if is_number else text.ljust(width)
            for text, width, is_number in zip(line, widths, right, strict=True)
        ]
        yield "  " + "  ".join(cells).rstrip()

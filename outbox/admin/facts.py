"""What the page of an entry says of it, in groups; what is empty is left out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from outbox.admin import show
from outbox.models import OutboxEntry
from outbox.states import State


@dataclass(frozen=True)
class Group:
    """A heading and its facts: (label, what is shown). A wide one has a block for each fact."""

    title: str
    facts: list[tuple[str, Any]]
    wide: bool = False


def of(entry: OutboxEntry) -> list[Group]:
    """The groups that have something to say, in the order in which a person asks."""
    groups = [
        Group("What", _given(_what(entry))),
        Group("Times", _given(_times(entry))),
        Group("Error", _given(_error(entry)), wide=True),
        Group("Counters", _given(_counters(entry))),
        Group("Run", _given(_run(entry))),
        Group("Call", _given(_call(entry)), wide=True),
    ]
    return [group for group in groups if group.facts]


def _given(facts: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [(label, value) for label, value in facts if value not in (None, "")]


def _what(entry: OutboxEntry) -> list[tuple[str, Any]]:
    return [
        ("State", show.state(entry.status)),
        ("Task", entry.task),
        ("Subject", entry.subject),
        ("Owner", entry.owner),
        ("Queue", entry.queue),
        ("Priority", entry.priority or ""),
        ("Unique key", entry.unique_key or entry.options.get("unique_key")),
        ("ID", entry.pk),
    ]


def _error(entry: OutboxEntry) -> list[tuple[str, Any]]:
    return [("Error", show.block(entry.error)), ("Traceback", show.block(entry.traceback))]


def _counters(entry: OutboxEntry) -> list[tuple[str, Any]]:
    return [
        ("Attempts", entry.attempts),
        ("Failures", _limited(entry.failures, entry.failure_limit)),
        ("before the last Retry", entry.forgiven_failures or ""),
        ("Crashes", _limited(entry.crashes, entry.crash_limit)),
        ("Released by workers", entry.releases or ""),
        ("Lost by the broker", entry.strands or ""),
        ("Published", entry.publishes),
    ]


def _limited(count: int, limit: int | None) -> str:
    return str(count) if limit is None else f"{count}, ends at {limit}"


def _times(entry: OutboxEntry) -> list[tuple[str, Any]]:
    waits = entry.status == State.PENDING and entry.available_at != entry.due_at
    times = {
        "Owed since": entry.due_at,
        "Next attempt": entry.available_at if waits else None,
        "Created": entry.created_at if entry.created_at != entry.due_at else None,
        "Published": entry.published_at,
        "Started": entry.started_at,
        "Ended": entry.finished_at,
        "Expires": entry.expires_at,
        "No attempt after": entry.deadline_at,
    }
    return [(label, show.moment(moment)) for label, moment in times.items() if moment]


def _run(entry: OutboxEntry) -> list[tuple[str, Any]]:
    return [
        ("Worker", entry.lease_owner),
        ("PID", entry.lease_pid),
        ("Lease until", entry.lease_until and show.moment(entry.lease_until)),
        ("Missing in the broker", entry.missing_since and show.moment(entry.missing_since)),
    ]


def _call(entry: OutboxEntry) -> list[tuple[str, Any]]:
    result = "" if entry.result is None else show.block(show.as_json(entry.result))
    options = show.block(show.as_json(entry.options)) if entry.options else ""
    return [
        ("Arguments", show.block(show.arguments(entry.task, entry.args, entry.kwargs))),
        ("Result", result),
        ("Options", options),
    ]

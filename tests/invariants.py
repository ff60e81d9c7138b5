"""What the tables show of entries, and the rules that hold for it whatever has happened."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models.functions import Now

from outbox.models import OutboxEffect, OutboxEntry, OutboxEvent, OutboxNotice
from tests.calls import HOUR
from tests.model import CANCELLED, FAILED, FINAL, RUNNING, STEPS, UNCERTAIN, Row

TELL_OWNER = "outbox.tell_owner"
FOLLOW = "outbox.follow"
INTERNAL = (TELL_OWNER, FOLLOW)
COUNTERS = ("attempts", "failures", "crashes", "releases", "strands", "publishes")
PLAIN = (
    "status", "version", *COUNTERS, "forgiven_failures", "failure_limit", "crash_limit",
    "claim_token", "lease_owner", "lease_pid", "unique_key",
)  # fmt: skip
TIMES = ("available_at", "due_at", "expires_at", "deadline_at", "lease_until")
FLAGS = {"missing": "missing_since", "finished": "finished_at"}
# Who may leave a state that is meant to last.
MAY_LEAVE = {UNCERTAIN: {"resolve", "cancel", "erase"}, **{end: {"requeue"} for end in FINAL}}


@dataclass(frozen=True)
class Seen:
    """An entry as the tables show it, its times in hours from now."""

    columns: Mapping[str, Any]
    effects: Mapping[str, str]
    events: tuple[tuple[str, str, str], ...]
    words: int
    followers: int

    @property
    def status(self) -> str:
        return str(self.columns["status"])


def look() -> dict[int, Seen]:
    """Every entry but the outbox's own; what owners are told and what follows is counted to it."""
    effects, events = _effects(), _events()
    words, followers = _words(), _followers()
    names = ("id", "task", *PLAIN, *TIMES, *FLAGS.values(), "now")
    rows = OutboxEntry.objects.exclude(task__in=INTERNAL).annotate(now=Now()).values(*names)
    return {
        pk.int: Seen(_columns(row), effects[pk], tuple(events[pk]), words[pk], followers[pk])
        for row in rows
        for pk in [row["id"]]
    }


def _columns(row: Mapping[str, Any]) -> dict[str, Any]:
    flags = {name: row[column] is not None for name, column in FLAGS.items()}
    times = {name: _hours(row[name], since=row["now"]) for name in TIMES}
    return {**{name: row[name] for name in ("task", *PLAIN)}, **times, **flags}


def _hours(at: datetime | None, *, since: datetime) -> int | None:
    return None if at is None else round((at - since) / HOUR)


def _effects() -> dict[UUID, dict[str, str]]:
    found: dict[UUID, dict[str, str]] = defaultdict(dict)
    rows = OutboxEffect.objects.values_list("entry_id", "name", "done_at", "cleared_at")
    for entry, name, done, cleared in rows:
        found[entry][name] = "done" if done else "cleared" if cleared else "begun"
    return found


def _events() -> dict[UUID, list[tuple[str, str, str]]]:
    found: dict[UUID, list[tuple[str, str, str]]] = defaultdict(list)
    rows = OutboxEvent.objects.order_by("pk")
    for entry, *event in rows.values_list("entry_id", "verb", "from_status", "to_status"):
        found[entry].append((event[0], event[1], event[2]))
    return found


def _followers() -> Counter[UUID | None]:
    return Counter(OutboxEntry.objects.filter(task=FOLLOW).values_list("parent_id", flat=True))


def _words() -> Counter[UUID]:
    return Counter(OutboxNotice.objects.values_list("entry_id", flat=True))


def differences(row: Row, seen: Seen, *, now: int) -> Iterator[str]:
    """Where the tables and the model disagree."""
    for name in (*PLAIN, *FLAGS):
        yield from _difference(name, getattr(row, name), seen.columns[name])
    for name in TIMES:
        at = getattr(row, name)
        yield from _difference(
            f"{name} in hours", at if at is None else at - now, seen.columns[name]
        )
    yield from _difference("effects", row.effects, seen.effects)
    yield from _difference("events", row.events, list(seen.events))
    yield from _difference("notices to its owner", row.words, seen.words)
    yield from _difference("what follows its ends", row.followers, seen.followers)


def _difference(name: str, due: Any, found: Any) -> Iterator[str]:
    if due != found:
        yield f"{name}: {found!r}, not {due!r}"


def broken(seen: Seen) -> Iterator[str]:
    """Rules that a row breaks by itself."""
    columns, status = seen.columns, seen.status
    leased = {columns[name] is not None for name in ("lease_owner", "lease_pid", "lease_until")}
    if len(leased) > 1:
        yield "a lease is whole or not there"
    if True in leased and status not in (RUNNING, CANCELLED):
        yield "only a run has a lease"
    if status == RUNNING and (False in leased or columns["claim_token"] is None):
        yield "a run has a lease and a token"
    if columns["finished"] != (status in FINAL):
        yield "finished_at is set at the end, and only then"
    if status in FINAL and columns["unique_key"] is not None:
        yield "an end frees the unique key"
    if status == FAILED and "begun" in seen.effects.values():
        yield "nothing fails with an effect whose outcome is unknown"
    if columns["attempts"] < sum(columns[name] for name in ("failures", "crashes", "releases")):
        yield "an attempt ends once"
    yield from _illegal_events(seen)


def _illegal_events(seen: Seen) -> Iterator[str]:
    for verb, before, after in seen.events:
        if verb == "late":
            legal = before == after
        else:
            legal = before in STEPS[verb][0] and after in STEPS[verb][1]
        if not legal:
            yield f"no edge leads so: {verb} from {before} to {after}"


def broken_by_step(before: Seen, after: Seen, *, step: str) -> Iterator[str]:
    """Rules that a step breaks. What a database forgets is no step."""
    names = ("status", *COUNTERS)
    moved = any(before.columns[name] != after.columns[name] for name in names)
    if after.columns["version"] < before.columns["version"] + moved:
        yield "the version grows with every step"
    for name in COUNTERS:
        if after.columns[name] < before.columns[name]:
            yield f"a counter never falls: {name}"
    if after.status != before.status and step not in MAY_LEAVE.get(before.status, {step}):
        yield f"{step} does not leave {before.status}"
    if after.events[: len(before.events)] != before.events:
        yield "an event stays as it is"


def shared_keys(entries: Iterable[Seen]) -> set[tuple[str, str]]:
    """Unique keys that are live on more than one entry of a task."""
    keys = [(seen.columns["task"], seen.columns["unique_key"]) for seen in entries]
    return {key for key in keys if key[1] is not None and keys.count(key) > 1}


def still_said(erased: Iterable[UUID]) -> bool:
    """Whether an entry that was erased, or one of its events, has a text again."""
    ids = list(erased)
    entries = OutboxEntry.objects.filter(pk__in=ids).exclude(error="", traceback="")
    events = OutboxEvent.objects.filter(entry__in=ids)
    return entries.exists() or events.exclude(reason="", error="", traceback="").exists()

"""Retry, cancel and resolve by a person: permission, deed, the admin's log, and what to tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

from django.contrib.admin.models import CHANGE, LogEntry
from django.http import HttpRequest

from outbox import bulk
from outbox.bulk import Outcome
from outbox.conf import default_database
from outbox.models import OutboxEntry
from outbox.states import EDGES, Verb
from outbox.transitions import Asked
from outbox.words import counted

AT_ONCE = 1_000  # entries that one request touches
_NAMED = 3  # refused entries whose ID is told


@dataclass(frozen=True)
class Deed:
    """Something that a person may do to an entry. The permission is the verb's."""

    name: str
    verb: Verb
    label: str
    done: str  # what is said of those for which it was done
    logged: str
    do: Callable[..., list[Outcome]]

    @property
    def permission(self) -> str:
        return f"celery_outbox.{self.verb}_entry"

    def may(self, request: HttpRequest) -> bool:
        return request.user.has_perm(self.permission)

    def fits(self, entry: OutboxEntry) -> bool:
        """Whether to offer it for an entry in this state; the transition itself judges again."""
        if self.verb is Verb.REQUEUE and entry.run_goes_on:
            return False
        return entry.status in EDGES[self.verb].sources

    def seen(self, posted: Mapping[str, str]) -> dict[str, Any]:
        """What the person saw on the entry's page, where it is right of that alone.

        Raises:
            ValueError: the page did not say it.
        """
        if self.verb is not Verb.RESOLVE:
            return {}
        return {"asked": Asked(int(posted.get("version", "")), posted.get("effect", ""))}


REQUEUE = Deed(
    "requeue",
    Verb.REQUEUE,
    label="Retry",
    done="owed again, with a new retry budget",
    logged="Retried.",
    do=bulk.requeue,
)
CANCEL = Deed(
    "cancel", Verb.CANCEL, label="Cancel", done="cancelled", logged="Cancelled.", do=bulk.cancel
)
HAPPENED = Deed(
    "happened",
    Verb.RESOLVE,
    label="It happened",
    done="resolved: it happened",
    logged="Resolved: it happened.",
    do=partial(bulk.resolve, happened=True),
)
NOT_HAPPENED = Deed(
    "not_happened",
    Verb.RESOLVE,
    label="It did not happen",
    done="resolved: it did not happen, and is owed again",
    logged="Resolved: it did not happen.",
    do=partial(bulk.resolve, happened=False),
)
DEEDS = {deed.name: deed for deed in (REQUEUE, CANCEL, HAPPENED, NOT_HAPPENED)}


def perform(
    deed: Deed,
    ids: Iterable[UUID],
    *,
    request: HttpRequest,
    reason: str = "",
    **seen: Any,
) -> list[Outcome]:
    """Do it for each entry and write the admin's log, with the name of who asked."""
    actor = f"user:{request.user.get_username()}"
    outcomes = deed.do(ids, actor=actor, reason=reason, using=default_database(), **seen)
    _log(deed, [found.entry_id for found in outcomes if not found.refused], request, reason)
    return outcomes


def _log(deed: Deed, ids: Sequence[UUID], request: HttpRequest, reason: str) -> None:
    rows: Any = OutboxEntry.objects.using(default_database()).filter(pk__in=ids).only("task")
    user: Any = request.user
    words = f"{deed.logged} {reason}".strip()
    LogEntry.objects.log_actions(user.pk, list(rows), CHANGE, change_message=words)


def told(deed: Deed, outcomes: Iterable[Outcome]) -> Iterator[tuple[str, bool]]:
    """Sentences on what was done and what was refused and why: (words, whether it was done)."""
    refused: dict[str, list[UUID]] = defaultdict(list)
    done = 0
    for outcome in outcomes:
        if outcome.refused:
            refused[outcome.refused].append(outcome.entry_id)
        else:
            done += 1
    if done:
        yield f"{counted(done, 'entry', 'entries')} {deed.done}.", True
    for why, ids in refused.items():
        named = ", ".join(map(str, ids[:_NAMED])) + (" …" if len(ids) > _NAMED else "")
        yield f"{counted(len(ids), 'entry', 'entries')} refused: {why} ({named}).", False

"""The list's filters and its search, none of which asks the table what there is to choose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any
from uuid import UUID

from celery import current_app
from django.contrib import admin
from django.db.models import Q, Subquery, UUIDField, Value
from django.db.models.functions import Coalesce
from django.http import HttpRequest

from outbox.models import EntryQuerySet
from outbox.states import State

LATEST = 100_000  # entries that are looked through where no index helps

UNFINISHED = "unfinished"
_BY_NO_INDEX = {None, "", State.SUCCEEDED.value}  # nearly all have succeeded
_HEX = re.compile(r"[0-9a-f]{4,32}")


class StateFilter(admin.SimpleListFilter):
    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterator[tuple[str, str]]:
        yield UNFINISHED, "Unfinished"
        yield from ((state.value, state.value.capitalize()) for state in State)

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        if self.value() == UNFINISHED:
            return queryset.unfinished()
        return queryset.filter(status=self.value()) if self.value() else queryset


class _ColumnFilter(admin.SimpleListFilter):
    """By a column that no index has: where nothing else narrows the list, its latest part only."""

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        if not self.value():
            return queryset
        found = queryset.filter(**{str(self.parameter_name): self.value()})
        return _among_latest(found) if is_narrowed_to_latest(request) else found


def is_narrowed_to_latest(request: HttpRequest) -> bool:
    """Whether the list is filtered by task or queue, and by nothing that an index finds."""
    asked = request.GET
    by_column = asked.get("task") or asked.get("queue")
    return bool(by_column) and not asked.get("q") and asked.get("state") in _BY_NO_INDEX


def _among_latest(rows: EntryQuerySet) -> EntryQuerySet:
    ids = rows.model._default_manager.using(rows.db).order_by("-pk").values("pk")
    first = Subquery(ids[LATEST : LATEST + 1])
    return rows.filter(pk__gt=Coalesce(first, Value(UUID(int=0), UUIDField())))


class TaskFilter(_ColumnFilter):
    title = "task"
    parameter_name = "task"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(name, name) for name in _durable_tasks()]


@cache
def _durable_tasks() -> list[str]:
    current_app.loader.import_default_modules()  # a web process may not have imported them yet
    tasks = current_app.tasks.items()
    return sorted(name for name, task in tasks if getattr(task, "is_durable", False))


class QueueFilter(_ColumnFilter):
    """Shown where there is more than one queue."""

    title = "queue"
    parameter_name = "queue"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(name, name) for name in sorted(current_app.amqp.queues)]

    def has_output(self) -> bool:
        return len(self.lookup_choices) > 1


def search(queryset: EntryQuerySet, term: str) -> EntryQuerySet:
    """The entries with that ID, or an ID that begins so, or exactly that subject.

    By ranges and equality alone, so that each is a look into an index.
    """
    found = Q(subject=term)
    digits = term.lower().replace("-", "")
    if _HEX.fullmatch(digits):
        found |= Q(pk__range=(UUID(digits.ljust(32, "0")), UUID(digits.ljust(32, "f"))))
    return queryset.filter(found)

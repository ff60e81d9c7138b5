"""The list's filters and its search, none of which asks the table what there is to choose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any
from uuid import UUID

from celery import current_app
from django.contrib import admin
from django.db.models import Q
from django.http import HttpRequest

from outbox.models import EntryQuerySet
from outbox.states import State

_UNFINISHED = "unfinished"
_HEX = re.compile(r"[0-9a-f]{4,32}")


class StateFilter(admin.SimpleListFilter):
    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterator[tuple[str, str]]:
        yield _UNFINISHED, "Unfinished"
        yield from ((state.value, state.value.capitalize()) for state in State)

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        if self.value() == _UNFINISHED:
            return queryset.unfinished()
        return queryset.filter(status=self.value()) if self.value() else queryset


class TaskFilter(admin.SimpleListFilter):
    title = "task"
    parameter_name = "task"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(name, name) for name in _durable_tasks()]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return queryset.filter(task=self.value()) if self.value() else queryset


@cache
def _durable_tasks() -> list[str]:
    current_app.loader.import_default_modules()  # a web process may not have imported them yet
    tasks = current_app.tasks.items()
    return sorted(name for name, task in tasks if getattr(task, "is_durable", False))


class QueueFilter(admin.SimpleListFilter):
    """Shown where there is more than one queue."""

    title = "queue"
    parameter_name = "queue"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(name, name) for name in sorted(current_app.amqp.queues)]

    def has_output(self) -> bool:
        return len(self.lookup_choices) > 1

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return queryset.filter(queue=self.value()) if self.value() else queryset


def search(queryset: EntryQuerySet, term: str) -> EntryQuerySet:
    """The entries with that ID, or an ID that begins so, or exactly that subject.

    By ranges and equality alone, so that each is a look into an index.
    """
    found = Q(subject=term)
    digits = term.lower().replace("-", "")
    if _HEX.fullmatch(digits):
        found |= Q(pk__range=(UUID(digits.ljust(32, "0")), UUID(digits.ljust(32, "f"))))
    return queryset.filter(found)

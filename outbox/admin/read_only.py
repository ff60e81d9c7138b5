"""An admin in which nothing can be added, changed or deleted: rows move by transitions alone."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import Model, QuerySet
from django.http import HttpRequest

from outbox.conf import default_database


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # generic for mypy only
    """Looks at the first of `OUTBOX["DATABASES"]`, whatever the routers say."""

    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # a count for each choice of each filter
    sortable_by = ()

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).using(default_database())

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

"""Pages of a table with a hundred million rows: what lies further back is found by searching."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.http import HttpRequest
from django.utils.functional import cached_property

from outbox.admin import filters

COUNTED = 5_000  # entries


class BoundedPaginator(Paginator):  # type: ignore[type-arg]  # generic for mypy only
    """Counts up to `COUNTED` entries, in the list's own order, and reaches no further."""

    @cached_property
    def seen(self) -> int:
        objects: Any = self.object_list
        return int(objects.values("pk")[: COUNTED + 1].count())

    @property
    def count(self) -> int:
        return min(self.seen, COUNTED)

    @property
    def is_cut(self) -> bool:
        """Whether there are more than it counts."""
        return self.seen > COUNTED


class EntryList(ChangeList):
    """Knows whether it is only a part of what was asked for, so that the page can say so."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        narrowed = filters.is_narrowed_to_latest(request)
        self.among = f"{filters.LATEST:,}" if narrowed else ""

"""The entries: a list that stays quick, a page that says all of one, retry, cancel and resolve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any
from uuid import UUID

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import (
    HttpRequest,
    HttpResponse,
    HttpResponseBadRequest,
    HttpResponseRedirect,
)
from django.urls import URLPattern, path, reverse
from django.views.decorators.http import require_POST

from outbox.admin import deeds, facts, filters, related, show
from outbox.admin.deeds import DEEDS, Deed
from outbox.admin.paging import BoundedPaginator, EntryList
from outbox.admin.read_only import ReadOnlyAdmin
from outbox.models import OutboxEntry

_NOT_LISTED = ("args", "kwargs", "options", "result", "traceback", "trace_context")


@admin.register(OutboxEntry)
class EntryAdmin(ReadOnlyAdmin):
    list_display = ["state", "task_name", "subject", "age", "attempts", "short_error", "owner"]
    list_display_links = ["task_name"]
    list_filter = [filters.StateFilter, filters.TaskFilter, filters.QueueFilter]
    list_per_page = 100
    paginator = BoundedPaginator
    search_fields = ["id", "subject"]  # what is searched is in get_search_results
    search_help_text = "An ID or its beginning, or a whole subject such as shop.order:42"
    actions = [
        "requeue_selected",
        "cancel_selected",
        "happened_selected",
        "not_happened_selected",
    ]
    fieldsets = [(None, {"fields": []})]  # the page shows facts, and has no form

    class Media:
        css = {"all": ["celery_outbox/admin.css"]}

    # --- the list -------------------------------------------------------------------------------

    def get_queryset(self, request: HttpRequest) -> QuerySet[OutboxEntry]:
        rows = super().get_queryset(request)
        match = request.resolver_match
        listed = match is not None and (match.url_name or "").endswith("_changelist")
        return rows.defer(*_NOT_LISTED) if listed else rows

    def get_changelist(self, request: HttpRequest, **_: Any) -> type[EntryList]:
        return EntryList

    def get_ordering(self, request: HttpRequest) -> list[Any]:
        if request.GET.get("state") == filters.UNFINISHED:
            return ["due_at", "id"]  # what has been owed for longest; the index of open rows
        return ["-id"]  # version 7 IDs sort by time, and the primary key covers all rows

    def get_search_results(
        self, request: HttpRequest, queryset: Any, search_term: str
    ) -> tuple[Any, bool]:
        term = search_term.strip()
        return (filters.search(queryset, term) if term else queryset), False

    def changelist_view(
        self, request: HttpRequest, extra_context: Mapping[str, Any] | None = None
    ) -> HttpResponse:
        # Django drops an action that one may not take without a word; that is no answer.
        asked = request.POST.get("action", "").removesuffix("_selected")
        if asked in DEEDS and not DEEDS[asked].may(request):
            raise PermissionDenied
        return super().changelist_view(request, {"title": "Entries", **(extra_context or {})})

    def has_requeue_permission(self, request: HttpRequest) -> bool:
        return deeds.REQUEUE.may(request)

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        return deeds.CANCEL.may(request)

    def has_resolve_permission(self, request: HttpRequest) -> bool:
        return deeds.HAPPENED.may(request)

    @admin.action(description="Retry", permissions=["requeue"])
    def requeue_selected(self, request: HttpRequest, queryset: QuerySet[OutboxEntry]) -> None:
        self._do_selected(deeds.REQUEUE, request, queryset)

    @admin.action(description="Cancel", permissions=["cancel"])
    def cancel_selected(self, request: HttpRequest, queryset: QuerySet[OutboxEntry]) -> None:
        self._do_selected(deeds.CANCEL, request, queryset)

    @admin.action(description="Uncertain: it happened", permissions=["resolve"])
    def happened_selected(self, request: HttpRequest, queryset: QuerySet[OutboxEntry]) -> None:
        self._do_selected(deeds.HAPPENED, request, queryset)

    @admin.action(description="Uncertain: it did not happen", permissions=["resolve"])
    def not_happened_selected(self, request: HttpRequest, queryset: QuerySet[OutboxEntry]) -> None:
        self._do_selected(deeds.NOT_HAPPENED, request, queryset)

    def _do_selected(self, deed: Deed, request: HttpRequest, rows: QuerySet[OutboxEntry]) -> None:
        ids = list(rows.values_list("pk", flat=True)[: deeds.AT_ONCE + 1])
        self._do(deed, ids[: deeds.AT_ONCE], request=request)
        if len(ids) > deeds.AT_ONCE:
            words = f"Only the first {deeds.AT_ONCE:,} of the selection were looked at."
            self.message_user(request, words, messages.WARNING)

    def _do(self, deed: Deed, ids: Iterable[UUID], *, request: HttpRequest, **seen: Any) -> None:
        outcomes = deeds.perform(deed, ids, request=request, **seen)
        for words, done in deeds.told(deed, outcomes):
            self.message_user(request, words, messages.SUCCESS if done else messages.WARNING)

    # --- the page of one entry ------------------------------------------------------------------

    def get_urls(self) -> list[URLPattern]:
        own = [
            path(
                f"<uuid:entry_id>/{deed.name}/",
                self.admin_site.admin_view(require_POST(partial(self.deed_view, deed=deed))),
                name=f"celery_outbox_outboxentry_{deed.name}",
            )
            for deed in DEEDS.values()
        ]
        return own + super().get_urls()

    def deed_view(self, request: HttpRequest, entry_id: UUID, *, deed: Deed) -> HttpResponse:
        """A button of the page was pressed."""
        if not (deed.may(request) and self.has_view_permission(request)):
            raise PermissionDenied
        reason = request.POST.get("reason", "").strip()
        try:
            seen = deed.seen(request.POST)
        except ValueError:
            return HttpResponseBadRequest("What was asked is missing: load the page again.")
        self._do(deed, [entry_id], request=request, reason=reason, **seen)
        page = reverse(
            "admin:celery_outbox_outboxentry_change",
            args=[entry_id],
            current_app=self.admin_site.name,
        )
        return HttpResponseRedirect(page)

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        entry: OutboxEntry = kwargs["obj"]
        context |= {
            "title": entry.task,
            "subtitle": entry.subject or None,
            "deeds": [deed for deed in DEEDS.values() if deed.may(request) and deed.fits(entry)],
            "facts": facts.of(entry),
            "events": related.events(entry),
            "effects": (effects := related.effects(entry)),
            "question": related.question(entry, effects),
            "links": related.links(entry, request=request, site=self.admin_site),
        }
        return super().render_change_form(request, context, *args, **kwargs)

    # --- columns --------------------------------------------------------------------------------

    @admin.display(description="state")
    def state(self, entry: OutboxEntry) -> str:
        return show.state(entry.status)

    @admin.display(description="task")
    def task_name(self, entry: OutboxEntry) -> str:
        return show.dotted(entry.task)

    @admin.display(description="age")
    def age(self, entry: OutboxEntry) -> str:
        return show.age(entry.due_at)

    @admin.display(description="error")
    def short_error(self, entry: OutboxEntry) -> str:
        return show.first_line(entry.error)

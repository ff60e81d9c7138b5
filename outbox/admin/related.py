"""What belongs to an entry: its events, its effects, the entries and results beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from django.apps import apps
from django.contrib.admin import AdminSite
from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse

from outbox.admin import show
from outbox.models import OutboxEffect, OutboxEntry, OutboxEvent
from outbox.states import State

BEGUN = "begun, outcome unknown"
SHOWN = 200  # events: an entry that is retried for weeks has more


def events(entry: OutboxEntry) -> list[OutboxEvent]:
    """The last events, the latest first."""
    rows = OutboxEvent.objects.using(entry._state.db).filter(entry=entry)
    return list(rows.order_by("-id")[:SHOWN])


def effects(entry: OutboxEntry) -> list[dict[str, Any]]:
    """The ledger's lines, with what each outcome is called."""
    rows = OutboxEffect.objects.using(entry._state.db).filter(entry=entry)
    return [
        {
            "effect": effect,
            "outcome": _outcome(effect),
            "request": _json(effect.request),
            "result": _json(effect.result),
        }
        for effect in rows.order_by("id")
    ]


def question(entry: OutboxEntry, effects: Sequence[Mapping[str, Any]]) -> Mapping[str, str]:
    """What a person is asked of an uncertain entry, and of which effect; empty where nobody is."""
    if entry.status != State.UNCERTAIN:
        return {}
    begun = [line["effect"] for line in effects if line["outcome"] == BEGUN]
    if not begun:
        return {"effect": "", "words": "Its last run died. Did it do what it was to do?"}
    name, key = begun[0].name, begun[0].key
    return {"effect": name, "words": f"Did {name} happen? The other side knows it as {key}."}


def _outcome(effect: OutboxEffect) -> str:
    if effect.done_at:
        return "done"
    return "cleared: it did not happen" if effect.cleared_at else BEGUN


def _json(value: Any) -> str:
    return "" if value is None else show.as_json(value)


def links(entry: OutboxEntry, *, request: HttpRequest, site: AdminSite) -> list[tuple[str, str]]:
    """(words, address) of what is there and may be seen: parent, root, the stored result."""
    found = [*_ancestors(entry, site=site), *_result(entry, request=request, site=site)]
    return [link for link in found if link[1]]


def _ancestors(entry: OutboxEntry, *, site: AdminSite) -> Iterator[tuple[str, str]]:
    wanted = {"Parent": entry.parent_id, "Root": entry.root_id}
    ids = {pk for pk in wanted.values() if pk and pk != entry.pk}
    if not ids:
        return
    rows = OutboxEntry.objects.using(entry._state.db).filter(pk__in=ids)
    tasks = dict(rows.values_list("pk", "task"))
    for words, pk in wanted.items():
        if pk in tasks:
            yield f"{words}: {tasks[pk]}", address("celery_outbox_outboxentry", pk, site=site)


def _result(
    entry: OutboxEntry, *, request: HttpRequest, site: AdminSite
) -> Iterator[tuple[str, str]]:
    label = "django_celery_results"
    if not (apps.is_installed(label) and request.user.has_perm(f"{label}.view_taskresult")):
        return
    rows = apps.get_model(label, "TaskResult")._default_manager.filter(task_id=str(entry.pk))
    if found := rows.values_list("pk", "status").first():
        pk, status = found
        yield f"Celery's result: {status}", address(f"{label}_taskresult", pk, site=site)


def address(model: str, pk: Any, *, site: AdminSite) -> str:
    """The address of an object's page; empty where this site does not show that model."""
    try:
        return reverse(f"admin:{model}_change", args=[pk], current_app=site.name)
    except NoReverseMatch:
        return ""

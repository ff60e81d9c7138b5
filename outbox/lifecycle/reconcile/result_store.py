"""The third truth: what django-celery-results tells of an entry, where it is the result backend."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

from celery import Celery
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, router, transaction

from outbox import transitions
from outbox.lifecycle.reconcile import told
from outbox.models import OutboxEntry

logger = logging.getLogger("outbox")

_APP = "django_celery_results"
_LOCKED = "55P03"  # lock_not_available


def why_not_compared(app: Celery) -> str:
    """One sentence on why there is nothing to compare; empty: there is."""
    if not apps.is_installed(_APP):
        return "Results are not compared: django-celery-results is not installed."
    try:
        compared = is_ours(app.backend)
    except (ImproperlyConfigured, ImportError) as error:
        return f"Results are not compared: {error}"
    return "" if compared else "Results are not compared: the result backend is another one."


def is_ours(backend: Any) -> bool:
    """Whether results go into django-celery-results' table."""
    from django_celery_results.backends import DatabaseBackend

    return isinstance(backend, DatabaseBackend)


def model() -> Any:
    from django_celery_results.models import TaskResult

    return TaskResult


def alias() -> str:
    """The database that the results are in."""
    return str(router.db_for_write(model()))


def rows() -> Any:
    return model().objects.using(alias())


def said(ids: Iterable[UUID]) -> Mapping[UUID, str]:
    """What is stored of these entries."""
    found = rows().filter(task_id__in=[str(pk) for pk in ids])
    return {UUID(text): status for text, status in found.values_list("task_id", "status")}


def correct(app: Celery, entry: OutboxEntry, *, stored: str | None, using: str) -> bool:
    """Store what `AsyncResult` should say, if the row says `stored` and the entry has not moved on.

    The row is locked before the entry is looked at again. A worker that stores a later truth at
    this moment waits for the lock, and what it stores comes after. What it stored before is seen.
    """
    try:
        with transitions.short_of_patience(using=alias()):
            return _correct(app, entry, stored=stored, using=using)
    except DatabaseError as error:
        if getattr(error.__cause__, "sqlstate", None) != _LOCKED:
            raise
        return False  # somebody holds it: another pass will see
    except Exception as error:  # a value that the backend cannot encode: the others go on
        logger.warning("outbox.result.uncorrected entry_id=%s: %s", entry.pk, error)
        return False


def _correct(app: Celery, entry: OutboxEntry, *, stored: str | None, using: str) -> bool:
    row = _locked(str(entry.pk), stored)
    if row is None:
        return False
    now = OutboxEntry.objects.using(using).filter(pk=entry.pk, version=entry.version).first()
    if now is None:
        transaction.set_rollback(True, using=alias())
        return False
    app.backend.store_result(
        str(now.pk),
        told.value(now),
        told.state(now),
        traceback=now.traceback or None,
        request=told.request(now, worker=row.worker),
    )
    return True


def _locked(task_id: str, stored: str | None) -> Any:
    """The row as it was seen, held; one is made where there was none. None: it has changed."""
    if stored is None:
        row, made = rows().get_or_create(task_id=task_id)
        return row if made else None
    held = rows().select_for_update(skip_locked=True)
    return held.filter(task_id=task_id, status=stored).first()

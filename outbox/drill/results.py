"""The third truth during a drill: what django-celery-results says of the drilled jobs.

Each final state that it is told is compared with the entry at that very moment, by a trigger of
the drill's database alone: it must never be ahead. At the end it must agree.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from uuid import UUID

from celery import current_app
from django.apps import apps
from django.db import connections

from outbox.conf import default_database
from outbox.drill.record import Job
from outbox.states import State

_CREATE = """
CREATE TABLE outbox_drill_early (entry_id uuid NOT NULL, said text NOT NULL, was text NOT NULL);
CREATE FUNCTION outbox_drill_note_early() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO outbox_drill_early SELECT id, NEW.status, status FROM celery_outbox_entry
    WHERE id = NEW.task_id::uuid AND status NOT IN ('succeeded', 'failed', 'cancelled');
  RETURN NULL;
END $$;
CREATE TRIGGER outbox_drill_early
  AFTER INSERT OR UPDATE ON django_celery_results_taskresult FOR EACH ROW
  WHEN (NEW.status IN ('SUCCESS', 'FAILURE', 'REVOKED') AND NEW.task_id ~ '^[0-9a-f-]{36}$')
  EXECUTE FUNCTION outbox_drill_note_early();
"""
_COUNT = "SELECT count(*) FROM outbox_drill_early WHERE entry_id = ANY(%s)"

_ENDS: Mapping[str, str] = {
    State.SUCCEEDED: "SUCCESS",
    State.FAILED: "FAILURE",
    State.CANCELLED: "REVOKED",
}


def are_kept() -> bool:
    """Whether results go to the database that the drill can look into."""
    if not apps.is_installed("django_celery_results"):
        return False
    from django_celery_results.backends import DatabaseBackend

    return isinstance(current_app.backend, DatabaseBackend)


def watch() -> None:
    """From now on note each final state that is stored of an entry that is open."""
    if apps.is_installed("django_celery_results"):
        with connections[default_database()].cursor() as cursor:
            cursor.execute(_CREATE)


def stored_early(job_ids: Collection[UUID]) -> int | None:
    """How often a final state was stored of one of these that was open. None: nobody can tell."""
    if not are_kept():
        return None
    with connections[default_database()].cursor() as cursor:
        cursor.execute(_COUNT, [list(job_ids)])
        return int(cursor.fetchone()[0])


def stored_failures(job_ids: Collection[UUID]) -> int | None:
    """How many of these it calls a FAILURE now. None: nobody can tell."""
    if not are_kept():
        return None
    return list(stored(job_ids).values()).count("FAILURE")


def stored(job_ids: Collection[UUID]) -> Mapping[str, str]:
    """What is stored of these, by the text of their IDs."""
    if not are_kept():
        return {}
    from django_celery_results.models import TaskResult

    rows = TaskResult.objects.filter(task_id__in=list(map(str, job_ids)))
    return dict(rows.values_list("task_id", "status"))


def disagreements(jobs: Collection[Job]) -> list[str]:
    """A sentence for each of these of which the store says other than the record."""
    if not are_kept():
        return []
    said = stored([job.id for job in jobs])
    return [
        f"the result store says {found or 'nothing'} of {job.id}, which is {job.state}"
        for job in jobs
        if not _agrees(job, found := said.get(str(job.id)))
    ]


def _agrees(job: Job, said: str | None) -> bool:
    if not job.has_ended:
        return said not in _ENDS.values()
    task = current_app.tasks.get(job.task)
    return said == _ENDS[job.state] or (said is None and bool(task and task.ignore_result))

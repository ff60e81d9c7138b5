"""What the drill's own tasks do: a row in `outbox_drill_effect`, a table of its database alone."""

from __future__ import annotations

import os
from uuid import UUID

from django.db import connections

from outbox.conf import default_database
from outbox.drill.subject import Effect

CREATE = """
CREATE TABLE outbox_drill_effect (
  entry_id uuid NOT NULL, key text NOT NULL, pid integer NOT NULL,
  at timestamptz NOT NULL DEFAULT clock_timestamp()
)
"""
_INSERT = "INSERT INTO outbox_drill_effect (entry_id, key, pid) VALUES (%s, %s, %s)"
_SELECT = "SELECT entry_id, key, at FROM outbox_drill_effect WHERE entry_id = ANY(%s) ORDER BY at"


def make_table() -> None:
    with connections[default_database()].cursor() as cursor:
        cursor.execute(CREATE)


def take(job_id: str, *, key: str = "") -> None:
    """Have an effect of the job, under that key or the job's ID; in the transaction, if one is."""
    with connections[default_database()].cursor() as cursor:
        cursor.execute(_INSERT, [job_id, key or job_id, os.getpid()])


def of(job_ids: list[UUID]) -> dict[UUID, list[Effect]]:
    """The effects of these jobs, by job."""
    found: dict[UUID, list[Effect]] = {}
    with connections[default_database()].cursor() as cursor:
        cursor.execute(_SELECT, [job_ids])
        for job_id, key, at in cursor.fetchall():
            found.setdefault(job_id, []).append(Effect(key=key, at=at))
    return found

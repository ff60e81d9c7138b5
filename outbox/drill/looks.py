"""When reconcile's looks first missed an entry in the broker, noted by a trigger of the drill's.

The row forgets that as soon as it is owed again, and a pass may be quicker than whoever asks.
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from django.db import connections

from outbox.conf import default_database

_CREATE = """
CREATE TABLE outbox_drill_missed (entry_id uuid NOT NULL, at timestamptz NOT NULL);
CREATE FUNCTION outbox_drill_note_missed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO outbox_drill_missed VALUES (NEW.id, NEW.missing_since);
  RETURN NULL;
END $$;
CREATE TRIGGER outbox_drill_missed
  AFTER UPDATE OF missing_since ON celery_outbox_entry FOR EACH ROW
  WHEN (OLD.missing_since IS NULL AND NEW.missing_since IS NOT NULL)
  EXECUTE FUNCTION outbox_drill_note_missed();
"""
_SELECT = """
SELECT EXTRACT(EPOCH FROM %s - max(at)) FROM outbox_drill_missed WHERE entry_id = %s AND at < %s
"""


def watch() -> None:
    """From now on note each first miss."""
    with connections[default_database()].cursor() as cursor:
        cursor.execute(_CREATE)


def seconds_missed(job_id: UUID, *, until: datetime) -> float:
    """For how long looks had missed the entry by then."""
    with connections[default_database()].cursor() as cursor:
        cursor.execute(_SELECT, [until, job_id, until])
        return float(cursor.fetchone()[0] or 0)

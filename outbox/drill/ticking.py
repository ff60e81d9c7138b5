"""Who runs the maintenance ticks during a drill, noted by a trigger of its database alone.

The library keeps the last run of each. Whether two of them overlapped can be seen only from each
time that a tick's lease changes hands.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psutil
from django.db import connections

from outbox.conf import default_database
from outbox.models import OutboxTick

_CREATE = """
CREATE TABLE outbox_drill_tick (
  number bigserial, name text NOT NULL, too_early boolean NOT NULL, ran boolean NOT NULL,
  found jsonb NOT NULL, port integer, at timestamptz NOT NULL DEFAULT STATEMENT_TIMESTAMP()
);
CREATE FUNCTION outbox_drill_note_tick() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO outbox_drill_tick (name, too_early, ran, found, port) VALUES (
    NEW.name,
    NEW.lease_owner IS NOT NULL AND COALESCE(OLD.lease_until >= STATEMENT_TIMESTAMP(), false),
    NEW.last_at IS DISTINCT FROM OLD.last_at,
    NEW.findings,
    inet_client_port()
  );
  RETURN NULL;
END $$;
CREATE TRIGGER outbox_drill_tick
  AFTER UPDATE ON celery_outbox_tick FOR EACH ROW
  WHEN (NEW.last_at IS DISTINCT FROM OLD.last_at
        OR NEW.lease_owner IS DISTINCT FROM OLD.lease_owner)
  EXECUTE FUNCTION outbox_drill_note_tick();
"""
_SELECT = """
SELECT too_early, ran, found::text, port, at
FROM outbox_drill_tick WHERE name = %s AND at > %s ORDER BY number
"""


@dataclass(frozen=True)
class Step:
    """A tick's lease was taken or given back, or a run of it was recorded."""

    overlaps: bool  # it was taken from one that held it still
    ran: bool
    found: Mapping[str, Any]
    port: int  # of the client that wrote this
    at: datetime

    def did(self, kind: str) -> bool:
        """Whether this is the record of a run that found something of that kind."""
        return self.ran and bool(self.found.get(kind))


def watch() -> None:
    """From now on note each step."""
    with connections[default_database()].cursor() as cursor:
        cursor.execute(_CREATE)


def steps(name: str, *, since: datetime) -> list[Step]:
    """The steps of that tick after that moment, in their order."""
    with connections[default_database()].cursor() as cursor:
        cursor.execute(_SELECT, [name, since])
        return [
            Step(overlaps, ran, json.loads(found), port, at)
            for overlaps, ran, found, port, at in cursor.fetchall()
        ]


def lease_until(name: str) -> datetime | None:
    """Until when the tick is somebody's now."""
    found: datetime | None = OutboxTick.objects.values_list("lease_until", flat=True).get(name=name)
    return found


def ports(pids: Collection[int]) -> set[int]:
    """Of all connections that these processes have: who wrote a step can be told by them."""
    found = (psutil.Process(pid).net_connections("tcp") for pid in pids)
    return {each.laddr.port for connections in found for each in connections if each.laddr}

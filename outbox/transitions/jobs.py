"""The way that nearly every entry takes: one statement a step, without reading first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from outbox import prepared, sql
from outbox.events import tell
from outbox.states import EDGES, Verb


def enqueue(row: Mapping[str, Any], *, using: str) -> bool:
    """Insert an entry in the caller's transaction. False: its ID or live unique key is taken."""
    with prepared.cursor(using) as cursor:
        cursor.execute(sql.ENQUEUE, row)
        inserted = bool(cursor.rowcount == 1)
    if inserted:
        _tell_row(Verb.ENQUEUE, row, using=using)
    return inserted


def plain_row(given: Mapping[str, Any]) -> dict[str, Any]:
    """A whole row for `enqueue`, due at once, from the columns that are given."""
    names = "eta expires_at expires_in retry_deadline crash_limit unique_key root_id parent_id"
    unset = dict.fromkeys(names.split())
    texts = {"args": "[]", "kwargs": "{}", "options": "{}", "subject": "", "owner": ""}
    at_once = {"countdown": timedelta(), "publish_after": timedelta()}
    return {**unset, **texts, **at_once, "queue": "celery", "priority": 0, **given}


def publish(read: Sequence[tuple[UUID, int]], *, using: str) -> int:
    """Mark as published what is still in the version that was read: (ID, version) pairs."""
    ids, versions = [str(pk) for pk, _ in read], [version for _, version in read]
    with prepared.cursor(using) as cursor:
        cursor.execute(sql.PUBLISH, {"ids": ids, "versions": versions})
        return int(cursor.rowcount)


def claim(
    entry_id: UUID,
    *,
    task: str,
    token: UUID,
    owner: UUID,
    pid: int,
    lease: float,
    synced: bool,
    keep_unique: bool = False,
    using: str,
) -> dict[str, Any] | None:
    """Take the entry under a lease of `lease` seconds. None: it is not there to be claimed.

    Repeating it with the same token returns the same claim: its reply may have been lost.
    `synced=False` commits without waiting for the disk, which a crash of the server may forget.
    """
    values: dict[str, Any] = {
        "id": entry_id,
        "task": task,
        "token": token,
        "owner": owner,
        "pid": pid,
        "lease": timedelta(seconds=lease),
        "keep_unique": keep_unique,
    }
    with prepared.cursor(using) as cursor:
        cursor.execute(sql.CLAIM if synced else sql.CLAIM_UNSYNCED, values)
        row = cursor.fetchone()
    if row is None:
        return None
    found = dict(zip(sql.CLAIMED, row, strict=True))
    _tell_row(Verb.CLAIM, found, using=using)
    return found


def renew(ids: Iterable[UUID], *, owner: UUID, lease: float, using: str) -> set[UUID]:
    """Extend the leases of the runs that `owner` knows to be alive; a locked row is skipped."""
    values: dict[str, Any] = {
        "ids": [str(pk) for pk in ids],
        "owner": owner,
        "lease": timedelta(seconds=lease),
    }
    with prepared.cursor(using) as cursor:
        cursor.execute(sql.RENEW, values)
        return {row[0] for row in cursor.fetchall()}


def _tell_row(verb: Verb, row: Mapping[str, Any], *, using: str) -> None:
    (status,) = EDGES[verb].targets
    told: dict[str, Any] = {"entry_id": row["id"], "task": row["task"], "owner": row["owner"]}
    tell(verb, **told, status=status.value, using=using)

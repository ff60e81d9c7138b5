"""What only a drilled process itself can see, written down for the drill: signals as they fire."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any
from uuid import UUID

from celery.signals import task_received

from outbox.drill.environment import JOURNAL
from outbox.signals import entry_failed

RECEIVED, FAILED = "received", "failed"


def listen() -> None:
    """Note each delivery that a worker receives, and each `entry_failed`."""
    task_received.connect(_note_received, weak=False)
    entry_failed.connect(_note_failed, weak=False)


def count(journal: Path, *, job_ids: Collection[UUID]) -> Counter[str]:
    """How often what was noted of these jobs, in any process."""
    if not journal.exists():
        return Counter()
    ids = set(map(str, job_ids))
    notes = map(json.loads, journal.read_text().splitlines())
    return Counter(note["what"] for note in notes if note["job"] in ids)


def _note_received(*, request: Any, **_: Any) -> None:
    _note(RECEIVED, request.id)


def _note_failed(*, entry_id: UUID, **_: Any) -> None:
    _note(FAILED, entry_id)


def _note(what: str, job: object) -> None:
    # One write of one line: processes do not mix theirs.
    line = json.dumps({"what": what, "job": str(job), "pid": os.getpid()})
    descriptor = os.open(os.environ[JOURNAL], os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)

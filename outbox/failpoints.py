"""Stop points: the places where the recovery drill and the crash tests stop a real process.

Armed by the environment alone, `OUTBOX_FAILPOINTS="claim.claimed=/some/file"`: the first process
to reach the point creates the file, writes its PID into it and stands still until it is killed,
or the file is removed (then the next one stops) or emptied (then nobody does any more). Unarmed,
`reach` is one look at an empty dict.
"""

from __future__ import annotations

import os
import time
from enum import StrEnum
from pathlib import Path


class Failpoint(StrEnum):
    """Each window in which a death must not lose, repeat or forge an entry."""

    ENQUEUED = "enqueue.inserted"  # the row is written, the caller's transaction still open
    COMMITTED = "publish.committed"  # committed, nothing published yet
    FLUSHED = "publish.flushed"  # the broker has the messages, the rows are not marked
    DELIVERED = "claim.delivered"  # it has reached the process that would run it; nothing claimed
    CLAIMED = "claim.claimed"  # the claim is committed, the body has not begun
    BEGUN = "effect.begun"  # the ledger has it as begun, the call has not been made
    PERFORMED = "effect.performed"  # the call has returned, its outcome is not recorded
    RETURNED = "run.returned"  # the body is done, its ending not recorded
    FOUND = "reconcile.found"  # reconcile has looked through the broker, and not repaired yet


VARIABLE = "OUTBOX_FAILPOINTS"


def _armed() -> dict[str, Path]:
    pairs = (item.partition("=") for item in os.environ.get(VARIABLE, "").split(",") if item)
    return {str(Failpoint(name)): Path(path) for name, _, path in pairs}


_points = _armed()


def reach(point: Failpoint) -> None:
    """Stand still here if the environment arms this point and nobody has reached it before."""
    if _points and (marker := _points.get(point)):
        _stand_still(marker)


def _stand_still(marker: Path) -> None:
    try:
        descriptor = os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(str(os.getpid()))
    while _size(marker):
        time.sleep(0.05)


def _size(marker: Path) -> int:
    try:
        return marker.stat().st_size
    except FileNotFoundError:
        return 0

"""Who this worker is: a UUID per boot, since host names and PIDs are reused."""

from __future__ import annotations

from uuid import uuid4

# Drawn when the main process imports it, before the pool forks: its children share it.
BOOT = uuid4()

"""What people do during a drill: look at the status, and requeue while others are at the row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from django.db import connections

import outbox
from outbox.conf import default_database

ACTOR = "drill"
COMMAND_SECONDS = 60.0


def status(env: Mapping[str, str]) -> dict[str, Any]:
    """What `outbox_status` says to whoever asks it in that environment, and its exit status."""
    command = [sys.executable, "-m", "django", "outbox_status", "--format", "json"]
    ran = subprocess.run(
        command,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_SECONDS,
    )
    return {**json.loads(ran.stdout or "{}"), "exit status": ran.returncode}


@dataclass(frozen=True)
class Request:
    """One person's requeue, which may have to wait for the row."""

    session: Future[int] = field(default_factory=Future)  # the backend's PID
    answer: Future[bool] = field(default_factory=Future)


def ask_to_requeue(job_id: UUID) -> Request:
    """Requeue it in a thread and over a connection of its own."""
    request = Request()

    def ask() -> None:
        connection = connections[default_database()]
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_backend_pid()")
                request.session.set_result(cursor.fetchone()[0])
            request.answer.set_result(outbox.requeue(job_id, actor=ACTOR))
        except Exception as error:
            for future in (request.session, request.answer):
                if not future.done():
                    future.set_exception(error)
        finally:
            connection.close()

    threading.Thread(target=ask, daemon=True, name="requeueing").start()
    return request

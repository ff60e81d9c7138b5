"""django-celery-outbox from PyPI, in an environment and a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.paired import Void

VERSION = "0.4.3"
NAME = f"django-celery-outbox {VERSION}"
SAME = ("Django", "celery", "kombu", "redis", "psycopg", "psycopg-binary")
INSTALL_SECONDS = 300
CHILD = Path(__file__).with_name("peer_child.py")


class Peer:
    """Asks the child process to work, and gets back how many it did, and in what time."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child

    def ask(self, verb: str, count: int) -> dict[str, Any]:
        assert self._child.stdin
        assert self._child.stdout
        print(verb, count, file=self._child.stdin, flush=True)
        if not (answer := self._child.stdout.readline()):
            raise Void(f"{NAME} ended in the middle of {verb}")
        return json.loads(answer)


@contextmanager
def peer(folder: Path, *, database: str, broker: str) -> Iterator[Peer | None]:
    """It, or None where it cannot be installed, with a line that says so."""
    if (python := _installed(folder / "peer")) is None:
        print(f"{NAME} cannot be installed here: it is left out.", file=sys.stderr)
        yield None
        return
    env = {**os.environ, "DATABASE_URL": database, "CELERY_BROKER_URL": broker}
    with subprocess.Popen(
        [python, CHILD],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        yield Peer(child)  # it ends with its input, which Popen closes


def _installed(folder: Path) -> Path | None:
    python, ready = folder / "bin" / "python", folder / VERSION
    if ready.exists():
        return python
    same = [f"{package}=={version(package)}" for package in SAME]
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        wanted = [f"django-celery-outbox=={VERSION}", "dj-database-url", "celery[redis]", *same]
        subprocess.run([*pip, *wanted], check=True, timeout=INSTALL_SECONDS, capture_output=True)
    except (OSError, subprocess.SubprocessError):
        return None
    ready.touch()
    return python

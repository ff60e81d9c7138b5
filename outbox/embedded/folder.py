"""The folder that servers keep their files in: held by one process, its secrets private."""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from outbox.embedded.errors import EmbeddedError


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a+")
    except OSError as error:
        raise EmbeddedError(f"{folder} cannot be written ({error}): choose another.") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise EmbeddedError(
                f"Another process is using {folder} (pid {lock.read()}):"
                " stop it or choose another folder."
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def password(folder: Path) -> str:
    """Made once: a superuser's port that is open to everybody on the machine needs one."""
    path = folder / "password"
    if not path.exists():
        write_private(path, secrets.token_urlsafe(24))
    return path.read_text()


def write_private(path: Path, text: str) -> None:
    aside = path.with_name(f"{path.name}.new")
    aside.unlink(missing_ok=True)
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write(text)
    aside.rename(path)

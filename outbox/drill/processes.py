"""Real child processes for the drill, the demo and the tests: started, watched, killed whole."""

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from types import TracebackType
from typing import Self, TypeVar

POLL_SECONDS = 0.02
TAIL_BYTES = 64 * 1024

T = TypeVar("T")

# Runs in the child before the real program. A `preexec_fn` could set the death signal too, but may
# deadlock where the owner has threads. The owner may die before the signal is set: hence getppid.
_DIE_WITH_OWNER = """
import ctypes, os, signal, sys
owner, death_signal, *argv = sys.argv[1:]
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(death_signal))
for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(ignored_by_python, signal.SIG_DFL)
if os.getppid() != int(owner):
    sys.exit(1)
try:
    os.execvp(argv[0], argv)
except OSError as error:
    sys.exit(f"{argv[0]}: {error.strerror}")
"""


class ProcessError(Exception):
    """A child process ended too early, or did not do what was waited for in time."""


class _Spawner:
    """The one thread that starts every child.

    Linux sends the death signal when the *thread* that started the child ends, so a child that a
    short-lived thread starts would die with that thread. This one lives as long as the process.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def run(self, job: Callable[[], None]) -> None:
        done: Future[None] = Future()
        with self._lock:
            # After a fork the thread is not alive in the child: start another.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="spawner", daemon=True)
                self._thread.start()
            self._jobs.put((job, done))
        done.result()

    def _work(self) -> None:
        while True:
            job, done = self._jobs.get()
            try:
                job()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)


_spawner = _Spawner()


class Process:
    """A child process in a session of its own, which dies when its owner does.

    :param argv: the command; its first item is looked up on PATH.
    :param env: added to this process's own environment.
    :param log: file that stdout and stderr are appended to.
    :param stop_signal: how it is asked to end.
    :param death_signal: what it gets on Linux when this process dies, however it dies.
    """

    def __init__(
        self,
        name: str,
        *,
        argv: Sequence[str | Path],
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stop_signal: Signals = SIGTERM,
        death_signal: Signals = SIGKILL,
    ) -> None:
        self.name = name
        self.argv = [str(part) for part in argv]
        self.env = dict(env or {})
        self.log = log
        self.cwd = cwd
        self.stop_signal = stop_signal
        self.death_signal = death_signal
        self._popen: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def start(self) -> Self:
        """Start it, again where it has ended.

        :raises ProcessError: it runs already.
        """
        if self.alive:
            raise ProcessError(f"{self.name} runs already as PID {self.pid}: stop it first.")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        _spawner.run(self._launch)
        return self

    def _launch(self) -> None:
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._popen = subprocess.Popen(
                [*self._prefix(), *self.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.cwd,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.env},
                start_new_session=True,
            )

    def _prefix(self) -> list[str]:
        if sys.platform != "linux":
            return []
        wrapper = [sys.executable, "-I", "-S", "-c", _DIE_WITH_OWNER]
        return [*wrapper, str(os.getpid()), str(int(self.death_signal))]

    @property
    def pid(self) -> int:
        """The PID of its latest start."""
        if self._popen is None:
            raise ProcessError(f"{self.name} has not been started.")
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen is not None and self.returncode is None

    @property
    def returncode(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        if self._popen is None:
            return None
        if self._popen.returncode is None and self._popen.poll() is not None:
            # Only now: later the number may belong to somebody else's group.
            self._signal_group(SIGKILL)
        return self._popen.returncode

    def signal(self, sig: Signals) -> None:
        """Send a signal to the process alone, not to its children."""
        if self.alive:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """SIGKILL its whole group, and return once the process is gone."""
        if self._popen is None or not self.alive:
            return
        self._signal_group(SIGKILL)
        self._popen.wait()

    def stop(self, timeout: float = 10.0) -> None:
        """Ask it to end, wait up to `timeout` seconds, then SIGKILL what is left of its group."""
        self.signal(self.stop_signal)
        with contextlib.suppress(ProcessError):
            self.wait(timeout)
        self.kill()

    def wait(self, timeout: float) -> int:
        """Its exit status, once it has ended by itself.

        :raises ProcessError: it still runs after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while self.alive:
            if time.monotonic() > deadline:
                raise ProcessError(self._report(f"still runs after {timeout:g} s"))
            time.sleep(POLL_SECONDS)
        return self.returncode or 0

    def _signal_group(self, sig: Signals) -> None:
        # macOS answers EPERM where only zombies are left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, sig)

    def tail(self, lines: int = 20) -> str:
        """The last lines that it wrote since its latest start."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - TAIL_BYTES))
            text = log.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def wait_for(self, predicate: Callable[[], T], *, timeout: float, what: str) -> T:
        """Ask `predicate` until its answer is true, and return that answer.

        :param timeout: seconds.
        :param what: what is waited for, for the message: "listening", "the first mail".
        :raises ProcessError: it ended before, or the time is over; with the tail of its log.
        """
        deadline = time.monotonic() + timeout
        while not (answer := predicate()):
            if not self.alive:
                raise ProcessError(self._report(f"ended with {self.returncode} before {what}"))
            if time.monotonic() > deadline:
                raise ProcessError(self._report(f"waited {timeout:g} s in vain for {what}"))
            time.sleep(POLL_SECONDS)
        return answer

    def _report(self, event: str) -> str:
        return f"{self.name}: {event}. The end of {self.log}:\n{self.tail()}"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: a port in TIME_WAIT after a restart is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True

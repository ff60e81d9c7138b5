"""What both servers have in common: ports, starting, stopping, killing, leftovers."""

import contextlib
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

try:
    import psutil
except ImportError:
    psutil = None  # type: ignore[assignment]

from outbox.drill.processes import Process, ProcessError, free_port, port_is_free
from outbox.embedded.errors import INSTALL, EmbeddedError

START_SECONDS = 60.0
GONE_SECONDS = 10.0
PORT_ATTEMPTS = 5


class Server:
    """A server whose files are in `folder`. `servers()` holds the folder; on your own, hold it too.

    :param port: 0 takes a free one at the first start.
    """

    name: ClassVar[str]
    stop_signal: ClassVar[signal.Signals]
    death_signal: ClassVar[signal.Signals]

    def __init__(self, folder: Path, *, port: int = 0) -> None:
        if psutil is None:
            raise EmbeddedError(f"The package psutil is not installed: {INSTALL}")
        self.folder = folder.absolute()
        self.data = self.folder / self.name
        self.port = port
        self._port_is_settled = bool(port)
        self._pid_file = self.folder / f"{self.name}.pid"
        self._process: Process | None = None

    @property
    def url(self) -> str:
        """Where clients find it, with the password in it."""
        raise NotImplementedError

    @property
    def process(self) -> Process:
        """The child process, for its state and its log."""
        if self._process is None:
            raise EmbeddedError(f"{self.name} has not been started: call start() first.")
        return self._process

    @property
    def pid(self) -> int:
        """The PID of the server's main process."""
        return self.process.pid

    def start(self) -> None:
        """Start it, and return once it answers. Later starts use the same port and data.

        :raises EmbeddedError: it cannot be started.
        """
        if self._process is not None and self._process.alive:
            raise EmbeddedError(f"{self.name} runs already: stop it first.")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._end_leftover()
        self._prepare()
        for _ in range(PORT_ATTEMPTS):
            self._choose_port()
            if self._start_on_port():
                self._port_is_settled = True
                return
        raise EmbeddedError(f"No free port for {self.name} was found: try again.")

    def stop(self) -> None:
        """Shut it down in order."""
        if self._process is not None:
            self._end(self._process.stop)

    def kill(self) -> None:
        """SIGKILL it and all its children, as a power cut would; `start()` brings it back."""
        if self._process is not None:
            # Stopped, it can start no child that the list below would miss.
            self._process.signal(signal.SIGSTOP)
            self._end(self._process.kill)

    def _prepare(self) -> None:
        raise NotImplementedError

    def _argv(self) -> list[str | Path]:
        raise NotImplementedError

    def _answers(self) -> bool:
        raise NotImplementedError

    def _choose_port(self) -> None:
        if not self._port_is_settled:
            self.port = free_port()
        elif not port_is_free(self.port):
            raise self._port_taken()

    def _port_taken(self) -> EmbeddedError:
        return EmbeddedError(f"Port {self.port} for {self.name} is taken: free it or use another.")

    def _start_on_port(self) -> bool:
        """False where somebody took the free port before the server could."""
        self._process = Process(
            self.name,
            argv=self._argv(),
            log=self.folder / f"{self.name}.log",
            env={"LC_ALL": "C"},
            stop_signal=self.stop_signal,
            death_signal=self.death_signal,
        ).start()
        self._remember()
        try:
            return self._process.wait_for(self._answers, timeout=START_SECONDS, what="it answered")
        except ProcessError as error:
            self.kill()
            if "Address already in use" not in self._process.tail():
                raise EmbeddedError(str(error)) from error
            if self._port_is_settled:
                raise self._port_taken() from error
            return False

    def _remember(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            created = psutil.Process(self.pid).create_time()
            self._pid_file.write_text(json.dumps({"pid": self.pid, "created": created}))

    def _end_leftover(self) -> None:
        # Only for systems without a death signal; the caller holds the folder, so it is nobody's.
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ValueError):
            noted = json.loads(self._pid_file.read_text())
            leftover = psutil.Process(noted["pid"])
            if abs(leftover.create_time() - noted["created"]) < 2:
                kill_all([leftover, *leftover.children(recursive=True)])

    def _end(self, end: Callable[[], None]) -> None:
        # PostgreSQL puts each child into a group of its own: the process's group is not enough.
        children: list[psutil.Process] = []
        if self.process.alive:
            children = psutil.Process(self.pid).children(recursive=True)
        end()
        kill_all(children)
        self._pid_file.unlink(missing_ok=True)


def kill_all(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + GONE_SECONDS
    while any(map(runs, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)


def runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def is_reused(pid: int, *, name: str) -> bool:
    """Whether somebody who is not `name`, or a zombie, has that PID now."""
    try:
        process = psutil.Process(pid)
        return process.name() != name or not runs(process)
    except psutil.NoSuchProcess:
        return False

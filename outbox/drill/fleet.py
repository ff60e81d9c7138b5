"""The drilled processes: web, dispatcher and worker, each started as it is in production."""

from __future__ import annotations

import sys
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Literal

import psutil

from outbox.drill.errors import DrillError
from outbox.drill.processes import Process, ProcessError, free_port
from outbox.embedded.server import runs
from outbox.failpoints import VARIABLE, Failpoint

Name = Literal["web", "dispatcher", "worker"]

START_SECONDS = 60.0
STOP_SECONDS = 5.0
GONE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Death:
    """A SIGKILL that was sent, and what the kernel said of it. Negative: ended by that signal."""

    name: Name
    pid: int
    at: float  # wall clock, seconds
    returncode: int


class Fleet:
    """Starts the drilled processes, stops them at failpoints, kills and restarts them."""

    def __init__(
        self, *, env: Mapping[str, str], folder: Path, celery_app: str, wsgi: str | None
    ) -> None:
        self.env, self.folder = dict(env), folder
        self.celery_app, self.wsgi = celery_app, wsgi
        self.port = 0
        self._running: dict[Name, Process] = {}
        self._variants: dict[Name, Mapping[str, str]] = {}

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def processes(self) -> Collection[Process]:
        return self._running.values()

    def ensure(self, wanted: Mapping[Name, Mapping[str, str]]) -> None:
        """Have these run, each with just this environment; leave alone what already does.

        Raises:
            DrillError: one did not start; with the end of its log.
        """
        begun = [
            self._begin(name, env) for name, env in wanted.items() if not self._runs_with(name, env)
        ]
        for process in begun:
            self._await_ready(process)

    def stop_at(self, point: Failpoint) -> dict[str, str]:
        """The environment of a process that is to stand still at the point."""
        self.marker(point).unlink(missing_ok=True)
        return {VARIABLE: f"{point}={self.marker(point)}"}

    def marker(self, point: Failpoint) -> Path:
        """The file that says which process stands still at the point."""
        return self.folder / f"{point}.marker"

    def belongs(self, pid: int, name: Name) -> bool:
        """Whether the PID is that process or one of its children."""
        process = self._running[name]
        if pid == process.pid:
            return True
        children = psutil.Process(process.pid).children(recursive=True) if process.alive else []
        return pid in {child.pid for child in children}

    def kill(self, name: Name) -> Death:
        """SIGKILL: the whole group of a worker, the one process of web and dispatcher."""
        process = self._running.pop(name)
        family = [psutil.Process(process.pid)]
        family += family[0].children(recursive=True)
        at = time.time()
        if name != "worker":
            process.signal(SIGKILL)
            process.wait(GONE_SECONDS)
        process.kill()
        self._await_gone(family)
        return Death(name=name, pid=process.pid, at=at, returncode=process.returncode or 0)

    def stop(self, *names: Name) -> None:
        """Stop them while they are idle, between points or for another variant."""
        for name in names:
            if (process := self._running.pop(name, None)) is None:
                continue
            if name == "worker":
                process.kill()  # its warm shutdown takes seconds, and nobody learns from it
            else:
                process.stop(STOP_SECONDS)

    def kill_all(self) -> None:
        """At the end, in order or not: quickly."""
        for process in self._running.values():
            process.kill()
        self._running.clear()

    def check(self) -> None:
        """Raises ProcessError, with the end of its log, where one died that nobody killed."""
        for process in self._running.values():
            if not process.alive:
                process.wait_for(lambda: False, timeout=0, what="anybody killed it")

    def log(self, name: Name) -> Path:
        return self.folder / f"{name}.log"

    def tail(self, name: Name) -> str:
        """The end of its log, since its latest start."""
        process = self._running.get(name)
        return process.tail(8) if process else f"(the {name} does not run)"

    def _runs_with(self, name: Name, env: Mapping[str, str]) -> bool:
        process = self._running.get(name)
        return bool(process and process.alive and self._variants[name] == env)

    def _begin(self, name: Name, env: Mapping[str, str]) -> Process:
        self.stop(name)
        self._variants[name] = dict(env)
        self._running[name] = Process(
            name,
            argv=[sys.executable, "-m", *self._command(name)],
            env={**self.env, **env},
            log=self.log(name),
            death_signal=Signals.SIGKILL,
        ).start()
        return self._running[name]

    def _command(self, name: Name) -> list[str]:
        if name == "web":
            self.port = free_port()
            module, _, attribute = (self.wsgi or "").rpartition(".")
            return ["waitress", f"--listen=127.0.0.1:{self.port}", f"{module}:{attribute}"]
        if name == "dispatcher":
            return ["django", "outbox_dispatcher"]
        quiet = ["--without-mingle", "--without-gossip", "--loglevel=INFO"]
        return [
            "celery",
            "-q",
            "-A",
            self.celery_app,
            "worker",
            "-n",
            "drill@%h",
            "-c",
            "2",
            *quiet,
        ]

    def _await_ready(self, process: Process) -> None:
        ready = {
            "web": self._web_answers,
            "dispatcher": lambda: "outbox.dispatcher.ready" in process.tail(200),
            "worker": lambda: " ready." in process.tail(200),
        }
        try:
            process.wait_for(ready[process.name], timeout=START_SECONDS, what="it was ready")
        except ProcessError as error:
            raise DrillError(str(error)) from error

    def _web_answers(self) -> bool:
        try:
            urllib.request.urlopen(self.base_url, timeout=START_SECONDS).close()
        except urllib.error.HTTPError:
            return True  # any answer is one
        except OSError:
            return False
        return True

    def _await_gone(self, family: Collection[psutil.Process]) -> None:
        deadline = time.monotonic() + GONE_SECONDS
        while left := [process.pid for process in family if runs(process)]:
            if time.monotonic() > deadline:
                raise DrillError(f"After SIGKILL these still run: {left}.")
            time.sleep(0.01)

"""The drilled processes: web, dispatchers, beats and workers, each started as in production."""

from __future__ import annotations

import sys
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals
from typing import Literal

import psutil

from outbox.drill.environment import QUEUES
from outbox.drill.errors import DrillError
from outbox.drill.processes import Process, ProcessError, free_port
from outbox.embedded.server import runs
from outbox.failpoints import VARIABLE, Failpoint

Name = Literal[
    "web", "dispatcher", "second dispatcher", "beat", "second beat", "worker", "second worker"
]
Env = Mapping[str, str]

WORKERS: Mapping[Name, str] = {"worker": "drill@%h", "second worker": "drill-second@%h"}
BEATS: tuple[Name, ...] = ("beat", "second beat")
SECONDS: tuple[Name, ...] = ("second dispatcher", *BEATS, "second worker")  # few points need them

_READY: Mapping[Name, str] = dict.fromkeys(WORKERS, " ready.") | dict.fromkeys(
    BEATS, "beat: Starting"
)

START_SECONDS = 60.0
STOP_SECONDS = 5.0
GONE_SECONDS = 10.0
EXIT_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Death:
    """A process that was ended, and what the kernel said of it. Negative: by that signal.

    A pool's child leaves its status to its pool: that it was killed and is gone must do.
    """

    name: str
    pid: int
    at: float  # wall clock, seconds: when the signal was sent
    returncode: int


class Fleet:
    """Starts the drilled processes, stops them at failpoints, kills and restarts them."""

    def __init__(self, *, env: Env, folder: Path, celery_app: str, wsgi: str | None) -> None:
        self.env, self.folder = dict(env), folder
        self.celery_app, self.wsgi = celery_app, wsgi
        self.port = 0
        self._running: dict[Name, Process] = {}
        self._variants: dict[Name, Env] = {}
        self._leaving: list[Process] = []  # asked to end: their exit is no accident
        self._frozen: set[Name] = set()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ensure(self, wanted: Mapping[Name, Env]) -> None:
        """Have these run, each with just this environment; leave alone what already does.

        Raises:
            DrillError: one did not start; with the end of its log.
        """
        begun = [
            (name, self._begin(name, env))
            for name, env in wanted.items()
            if not self._runs_with(name, env)
        ]
        for name, process in begun:
            self._await_ready(name, process)

    def reset(self) -> None:
        """Before a point: nothing of the last one is left but web, dispatcher and worker."""
        self.stop(*SECONDS, *self._frozen)
        self._end_those_that_leave()

    # --- stop points --------------------------------------------------------------------------

    def stop_at(self, *points: Failpoint, armed: bool = True) -> dict[str, str]:
        """The environment of a process that is to stand still at these, now or once armed."""
        for point in points:
            if armed:
                self.arm(point)
            else:
                self.let_go(point)
        return {VARIABLE: ",".join(f"{point}={self.marker(point)}" for point in points)}

    def arm(self, point: Failpoint) -> None:
        """Stop the next process that gets there; who stands there goes on."""
        self.marker(point).unlink(missing_ok=True)

    def let_go(self, point: Failpoint) -> None:
        """Who stands there goes on, and nobody stops there any more."""
        self.marker(point).write_text("")

    def marker(self, point: Failpoint) -> Path:
        """The file that says which process stands still at the point."""
        return self.folder / f"{point}.marker"

    # --- processes ----------------------------------------------------------------------------

    def belongs(self, pid: int, name: Name) -> bool:
        """Whether the PID is that process or one of its children."""
        return pid in {self._running[name].pid, *self.children(name)}

    def pid(self, name: Name) -> int:
        return self._running[name].pid

    def children(self, name: Name) -> set[int]:
        """The living children of a process."""
        process = self._running[name]
        found = psutil.Process(process.pid).children(recursive=True) if process.alive else []
        return {child.pid for child in found if runs(child)}

    def kill(self, name: Name) -> Death:
        """SIGKILL: the whole group of a worker, the one process of web and dispatcher."""
        process = self._running.pop(name)
        self._frozen.discard(name)
        family = [psutil.Process(process.pid)]
        family += family[0].children(recursive=True)
        at = time.time()
        if name not in WORKERS:
            process.signal(SIGKILL)
            process.wait(GONE_SECONDS)
        process.kill()
        _await_gone(family)
        return Death(name=name, pid=process.pid, at=at, returncode=process.returncode or 0)

    def kill_child(self, name: Name, pid: int, *, rearm: Failpoint | None = None) -> Death:
        """SIGKILL one child of a worker, and let the next one stop at the point where it stood.

        Raises:
            DrillError: it is no child of that worker.
        """
        if pid not in self.children(name):
            raise DrillError(f"PID {pid} is no child of the {name}.")
        child = psutil.Process(pid)
        child.suspend()  # else it would go on from its point when that is armed again
        if rearm:
            self.arm(rearm)
        at = time.time()
        child.kill()
        _await_gone([child])
        return Death(name=f"a child of the {name}", pid=pid, at=at, returncode=-int(SIGKILL))

    def freeze(self, name: Name, *, alone: bool = False) -> None:
        """SIGSTOP it, and with it all its children unless it alone is meant."""
        self._frozen.add(name)
        self._signal(name, SIGSTOP, alone=alone)

    def freeze_children(self, name: Name) -> None:
        """SIGSTOP its children alone: it goes on taking messages, and none of them runs."""
        self._frozen.add(name)
        self._signal_children(name, SIGSTOP)

    def thaw(self, name: Name, *, alone: bool = False) -> None:
        """SIGCONT them."""
        self._signal(name, SIGCONT, alone=alone)
        self._frozen.discard(name)

    def ask_to_end(self, name: Name, number: Signals) -> Process:
        """Send a signal that asks it to end; from now on its name is free for another."""
        process = self._running.pop(name)
        self._leaving.append(process)
        process.signal(number)
        return process

    def await_exit(self, process: Process, *, name: Name, at: float) -> Death:
        """Wait until a process that was asked to end has ended.

        Raises:
            ProcessError: it goes on, with the end of its log.
        """
        process.wait(EXIT_SECONDS)
        return Death(name=name, pid=process.pid, at=at, returncode=process.returncode or 0)

    def stop(self, *names: Name) -> None:
        """Stop them while they are idle, between points or for another variant."""
        for name in names:
            if (process := self._running.pop(name, None)) is None:
                continue
            if name in WORKERS or name in self._frozen:
                process.kill()  # its warm shutdown takes seconds, and nobody learns from it
            else:
                process.stop(STOP_SECONDS)
        self._frozen.difference_update(names)

    def kill_all(self) -> None:
        """At the end, in order or not: quickly."""
        for process in self._running.values():
            process.kill()
        self._running.clear()
        self._end_those_that_leave()

    def check(self) -> None:
        """Raises ProcessError, with the end of its log, where one died that nobody killed."""
        for process in self._running.values():
            if not process.alive:
                process.wait_for(lambda: False, timeout=0, what="anybody killed it")

    def log(self, name: Name) -> Path:
        return self.folder / f"{name.replace(' ', '-')}.log"

    def tail(self, name: Name, lines: int = 8) -> str:
        """The end of its log, since its latest start."""
        process = self._running.get(name)
        return process.tail(lines) if process else f"(the {name} does not run)"

    # --- how ----------------------------------------------------------------------------------

    def _runs_with(self, name: Name, env: Env) -> bool:
        process = self._running.get(name)
        return bool(process and process.alive and self._variants[name] == env)

    def _signal(self, name: Name, number: Signals, *, alone: bool) -> None:
        self._running[name].signal(number)
        if not alone:
            self._signal_children(name, number)

    def _signal_children(self, name: Name, number: Signals) -> None:
        for child in psutil.Process(self.pid(name)).children(recursive=True):
            child.send_signal(number)

    def _end_those_that_leave(self) -> None:
        for process in self._leaving:
            process.kill()
        self._leaving.clear()

    def _begin(self, name: Name, env: Env) -> Process:
        self.stop(name)
        self._variants[name] = dict(env)
        self._running[name] = Process(
            name,
            argv=[sys.executable, "-m", *self._command(name, env)],
            env={**self.env, **env},
            log=self.log(name),
            death_signal=Signals.SIGKILL,
        ).start()
        return self._running[name]

    def _command(self, name: Name, env: Env) -> list[str]:
        if name == "web":
            self.port = free_port()
            module, _, attribute = (self.wsgi or "").rpartition(".")
            return ["waitress", f"--listen=127.0.0.1:{self.port}", f"{module}:{attribute}"]
        if name in BEATS:
            schedule = str(self.folder / f"{name.replace(' ', '-')}-schedule")
            beat = ["celery", "-q", "-A", self.celery_app, "beat", "--loglevel=INFO"]
            return [*beat, f"--schedule={schedule}", "--pidfile="]
        if name not in WORKERS:
            return ["django", "outbox_dispatcher"]
        worker = ["celery", "-q", "-A", self.celery_app, "worker", "-n", WORKERS[name]]
        if QUEUES in env:
            worker += ["-Q", env[QUEUES]]
        return [*worker, "-c", "2", "--without-mingle", "--without-gossip", "--loglevel=INFO"]

    def _await_ready(self, name: Name, process: Process) -> None:
        def is_ready() -> bool:
            if name == "web":
                return self._web_answers()
            words = _READY.get(name, "outbox.dispatcher.ready")
            return words in process.tail(200)

        try:
            process.wait_for(is_ready, timeout=START_SECONDS, what="it was ready")
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


def _await_gone(family: Collection[psutil.Process]) -> None:
    deadline = time.monotonic() + GONE_SECONDS
    while left := [process.pid for process in family if runs(process)]:
        if time.monotonic() > deadline:
            raise DrillError(f"After SIGKILL these still run: {left}.")
        time.sleep(0.01)

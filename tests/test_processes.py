"""Child processes: killed whole, explained by their log, and never left behind."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from outbox.drill.processes import Process, ProcessError
from tests.waiting import runs, wait_until, wait_until_gone

ROOT = Path(__file__).resolve().parent.parent

# Starts a child of its own in the same group, and says both PIDs.
PARENT = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(os.getpid(), child.pid)
signal.pause()
"""
STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf")
while True:
    signal.pause()
"""


def python(name: str, *, code: str, log: Path, env: dict[str, str] | None = None) -> Process:
    return Process(name, argv=[sys.executable, "-c", code], log=log / f"{name}.log", env=env)


def family(parent: Process) -> list[int]:
    text = parent.wait_for(parent.tail, timeout=10, what="the PIDs")
    return [int(pid) for pid in text.split()]


def test_kill_ends_the_whole_group(tmp_path: Path) -> None:
    with python("parent", code=PARENT, log=tmp_path) as parent:
        pids = family(parent)
        assert pids[0] == parent.pid
        parent.kill()
        assert not parent.alive
        assert parent.returncode == -signal.SIGKILL
        wait_until_gone(pids)


def test_child_that_outlives_its_parent_is_killed_once_that_is_noticed(tmp_path: Path) -> None:
    with python("parent", code=PARENT, log=tmp_path) as parent:
        pids = family(parent)
        parent.signal(signal.SIGTERM)
        wait_until(lambda: not parent.alive)
        wait_until_gone(pids)


def test_stop_kills_what_does_not_listen(tmp_path: Path) -> None:
    with python("deaf", code=STUBBORN, log=tmp_path) as deaf:
        deaf.wait_for(deaf.tail, timeout=10, what="the handler")
        deaf.stop(timeout=0.1)
        assert deaf.returncode == -signal.SIGKILL


def test_stopped_process_is_killed_too(tmp_path: Path) -> None:
    with python("parent", code=PARENT, log=tmp_path) as parent:
        pids = family(parent)
        parent.signal(signal.SIGSTOP)
        parent.kill()
        wait_until_gone(pids)


def test_wait_for_shows_the_log_of_a_process_that_ended_early(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['ANSWER']); sys.exit(3)"
    with python("short", code=code, log=tmp_path, env={"ANSWER": "forty-two"}) as short:
        with pytest.raises(ProcessError, match="short: ended with 3 before the end") as caught:
            short.wait_for(lambda: False, timeout=10, what="the end")
        assert "forty-two" in str(caught.value)


def test_wait_for_gives_up_in_time(tmp_path: Path) -> None:
    with (
        python("parent", code=PARENT, log=tmp_path) as parent,
        pytest.raises(ProcessError, match=r"parent: waited 0\.1 s in vain for rain"),
    ):
        parent.wait_for(lambda: False, timeout=0.1, what="rain")


def test_program_that_does_not_exist_says_so_in_its_log(tmp_path: Path) -> None:
    with (
        Process("ghost", argv=["/nonexistent"], log=tmp_path / "log") as ghost,
        pytest.raises(ProcessError, match="/nonexistent: No such file or directory"),
    ):
        ghost.wait_for(lambda: False, timeout=10, what="a miracle")


def test_started_again_it_has_a_new_pid_and_shows_only_its_new_output(tmp_path: Path) -> None:
    with python("echo", code="import os; print(os.getpid())", log=tmp_path) as echo:
        first = echo.pid
        assert echo.wait(10) == 0
        echo.start()
        assert echo.wait(10) == 0
        assert echo.pid != first
        assert echo.tail() == str(echo.pid)


def test_start_of_a_running_process_is_refused(tmp_path: Path) -> None:
    with (
        python("parent", code=PARENT, log=tmp_path) as parent,
        pytest.raises(ProcessError, match="runs already"),
    ):
        parent.start()


def test_process_outlives_the_thread_that_asked_for_it(tmp_path: Path) -> None:
    parent = python("parent", code=PARENT, log=tmp_path)
    thread = threading.Thread(target=parent.start)
    thread.start()
    thread.join()
    try:
        assert all(map(runs, family(parent)))
    finally:
        parent.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a death signal")
def test_process_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    code = f"""
import signal, sys
from pathlib import Path
from outbox.drill.processes import Process
child = Process("child", argv=["sleep", "600"], log=Path({str(tmp_path / "log")!r})).start()
print(child.pid, flush=True)
signal.pause()
"""
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        pid = int(owner.stdout.readline())
        assert runs(pid)
        os.kill(owner.pid, signal.SIGKILL)
    wait_until_gone([pid])

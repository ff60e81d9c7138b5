"""`python -m benchmarks.clerk`: what the clerk of an idle worker costs, at the default settings.

The statements are those that the server itself logged from the worker's connections; the CPU is
that of the worker's main process, which Celery's own event loop shares.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import django
import psutil
import psycopg
from django.core.management import call_command

from outbox.drill.processes import Process
from outbox.embedded import Servers, servers

# Servers of its own: they log every statement, which none of the other benchmarks may meet.
FOLDER = Path(__file__).resolve().parent.parent / ".run" / "clerk"
SECONDS = 60.0
SETTLING = 15.0  # what a start costs is not what the clerk costs
NAME = "measured-worker"  # of its connections
LINE = "{:<38} {:>17} {:>17}"


def main() -> int:
    with servers(FOLDER) as running:
        os.environ.update(running.environment, DJANGO_SETTINGS_MODULE="benchmarks.settings")
        os.environ.update(BENCH_RUNS=os.devnull, BENCH_STARTS=os.devnull)
        django.setup()
        call_command("migrate", verbosity=0)
        _log_statements(running)
        print(LINE.format("a worker of two children", "statements a min", "CPU ms a min"))
        for name, beside, jobs in CASES:
            with _worker(), beside():
                statements, cpu = _measure(running, jobs=jobs)
            print(LINE.format(name, f"{statements:.0f}", f"{cpu:.0f}"), flush=True)
    return 0


def _log_statements(running: Servers) -> None:
    with psycopg.connect(running.postgres.url, autocommit=True) as database:
        database.execute("ALTER SYSTEM SET log_statement = 'all'")
        database.execute("ALTER SYSTEM SET log_line_prefix = '%a '")
        database.execute("SELECT pg_reload_conf()")


@contextmanager
def _worker() -> Iterator[None]:
    from benchmarks import worker

    os.environ["PGAPPNAME"] = NAME
    try:
        with worker.running(FOLDER):
            os.environ["PGAPPNAME"] = "other"
            yield
    finally:
        os.environ["PGAPPNAME"] = "other"


@contextmanager
def _dispatcher() -> Iterator[None]:
    argv = [sys.executable, "manage.py", "outbox_dispatcher"]
    with Process("dispatcher", argv=argv, log=FOLDER / "dispatcher.log"):
        yield


CASES: list[tuple[str, Callable[[], Any], int]] = [
    ("alone: it dispatches and reconciles", nullcontext, 0),
    ("beside a dispatcher", _dispatcher, 0),
    ("beside a dispatcher, with two jobs", _dispatcher, 2),
]


def _measure(running: Servers, *, jobs: int) -> tuple[float, float]:
    from benchmarks import tasks, worker

    for _ in range(jobs):
        tasks.idling.apply_async((SECONDS + 2 * SETTLING,), queue=worker.QUEUE)
    time.sleep(SETTLING)
    (main,) = (
        process
        for process in psutil.Process().children(recursive=True)
        if "celery" in process.cmdline() and process.parent().pid == os.getpid()
    )
    before, cpu = _logged(running), main.cpu_times()
    time.sleep(SECONDS)
    after, now = _logged(running), main.cpu_times()
    spent = now.user + now.system - cpu.user - cpu.system
    return (after - before) * 60 / SECONDS, spent * 1000 * 60 / SECONDS


def _logged(running: Servers) -> int:
    with (running.postgres.folder / "postgres.log").open(errors="replace") as log:
        return sum(
            line.startswith(f"{NAME} LOG:  ") and ("statement: " in line or "execute " in line)
            for line in log
        )


if __name__ == "__main__":
    sys.exit(main())

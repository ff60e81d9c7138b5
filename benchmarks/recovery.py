"""From the signal to the first line of the next attempt: a child, a worker, a broker's content.

With short times, since a recovery is a sum of them. The bar of each round is that sum, with the
backoff that its crash was given. At the end every core is busy while two jobs run for several
leases: nothing may be taken from a healthy worker.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import FileIO

import psutil

from benchmarks import tasks, worker
from benchmarks.bench import Bench
from benchmarks.paired import Comparison, require
from outbox.drill.processes import Process
from outbox.models import OutboxEntry, OutboxEvent

LEASE, GRACE, TICK = 3.0, 4.0, 2.0  # seconds; TICK is how often reconcile looks
TIMES = {
    "LEASE": LEASE,
    "DISPATCH_EVERY": 1,
    "RECONCILE_EVERY": TICK,
    "STRAND_GRACE": GRACE,
    "CRASH_BACKOFF": 1,
}
NODES = ("bench-1@localhost", "bench-2@localhost")
LATER = "bench-later"  # nobody consumes it until its message is gone
LEASES = 8  # for so many two jobs run while all cores are busy
PATIENCE = 60.0  # seconds


def measure(bench: Bench) -> Iterator[Comparison]:
    with _field(bench) as field:
        blows = {
            "child killed": field.child_killed,
            "worker killed": field.worker_killed,
            "broker wiped": field.broker_wiped,
        }
        for name, blow in blows.items():
            rounds = [blow() for _ in range(bench.rounds)]
            yield Comparison(
                name=name,
                against="its bar",
                unit="s",
                ours=[seconds for seconds, _ in rounds],
                theirs=[bar for _, bar in rounds],
                bar=1,
                at_most=True,
            )
        field.two_jobs_while_all_cores_are_busy()


@contextmanager
def _field(bench: Bench) -> Iterator["Field"]:
    dispatcher = [sys.executable, "manage.py", "outbox_dispatcher"]
    log = bench.folder / "dispatcher.log"
    with ExitStack() as stack:
        os.environ[tasks.TIMES] = repr(TIMES)
        stack.callback(os.environ.pop, tasks.TIMES)
        starts = FileIO(os.open(os.environ[tasks.STARTS], os.O_RDWR))
        stack.enter_context(starts)
        stack.enter_context(Process("dispatcher", argv=dispatcher, log=log))
        workers = [stack.enter_context(worker.running(bench.folder, node)) for node in NODES]
        yield Field(bench, starts, workers)


@dataclass(frozen=True)
class Field:
    """Two workers and a dispatcher, and one job after the other in them."""

    bench: Bench
    starts: FileIO
    workers: list[Process]

    def child_killed(self) -> tuple[float, float]:
        entry = self._hanging()
        at = time.monotonic_ns()
        os.kill(entry.lease_pid or 0, signal.SIGKILL)
        return self._recovered(entry, at, allowed=1)

    def worker_killed(self) -> tuple[float, float]:
        entry = self._hanging()
        parent = psutil.Process(entry.lease_pid).ppid()
        number = [process.pid for process in self.workers].index(parent)
        at = time.monotonic_ns()
        self.workers[number].kill()
        found = self._recovered(entry, at, allowed=LEASE + 2)
        self.workers[number].start()
        worker.await_ready(self.workers[number], NODES[number])
        return found

    def broker_wiped(self) -> tuple[float, float]:
        self.bench.empty()
        entry = self._owe(queue=LATER)
        _until(lambda: self.bench.valkey.llen(LATER) and self.bench.entries("published"))
        at = time.monotonic_ns()
        self.bench.valkey.flushdb()
        worker.app.control.add_consumer(LATER, destination=list(NODES))
        found = self._recovered(entry, at, allowed=GRACE + 2 * TICK)
        worker.app.control.cancel_consumer(LATER, destination=list(NODES), reply=True)
        return found

    def two_jobs_while_all_cores_are_busy(self) -> None:
        self.bench.empty()
        burn, log = [sys.executable, "-c", "while True: pass"], self.bench.folder / "burn.log"
        with ExitStack() as stack:
            for _ in range(2 * (os.cpu_count() or 1)):
                stack.enter_context(Process("burner", argv=burn, log=log))
            for _ in range(2):
                tasks.idling.apply_async((LEASES * LEASE,), queue=worker.QUEUE)
            _until(lambda: self.bench.entries("succeeded") == 2)
        crashes = list(OutboxEntry.objects.values_list("attempts", "crashes"))
        require(crashes, [(1, 0)] * 2, f"attempts and crashes in {LEASES} leases on busy cores")

    def _owe(self, *, queue: str) -> OutboxEntry:
        result = tasks.owed_recovering.apply_async(queue=queue)
        return OutboxEntry.objects.get(pk=result.id)

    def _hanging(self) -> OutboxEntry:
        """A job in its first attempt, which goes on until it is killed."""
        self.bench.empty()
        tasks.hang().touch()
        entry = self._owe(queue=worker.QUEUE)
        self._next_start()
        tasks.hang().unlink()
        entry.refresh_from_db()
        return entry

    def _recovered(self, entry: OutboxEntry, at: int, *, allowed: float) -> tuple[float, float]:
        """How long it took from that moment, and how long it may take with this backoff."""
        seconds = (self._next_start() - at) / 1e9
        _until(lambda: self.bench.entries("succeeded"))
        crash = OutboxEvent.objects.filter(entry=entry, verb="crash").first()
        entry.refresh_from_db()
        backoff = (entry.available_at - crash.at).total_seconds() if crash else 0
        require(entry.attempts, 1 + bool(crash), "attempts")
        return seconds, allowed + max(backoff, 0)

    def _next_start(self) -> int:
        return int(self.starts.readline())


def _until(seen: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not seen():
        require(time.monotonic() < deadline, True, f"within {PATIENCE:g} s")
        time.sleep(0.01)

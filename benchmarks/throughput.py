"""Jobs per second through a worker: a queue is filled first and consumed after, so that the worker
and nothing else is the bottleneck. Both sides run in the same worker process."""

import os
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from django.db import transaction

from benchmarks import tasks, worker
from benchmarks.bench import Bench
from benchmarks.paired import Comparison, Void, interleaved, require

JOBS = 2_000
LONGEST = 120.0  # seconds a round may take
_numbers = count()


def measure(bench: Bench) -> Iterator[Comparison]:
    runs = Path(os.environ[tasks.RUNS])
    with worker.running(bench.folder):
        sides = {
            "ours": lambda: _round(bench, runs, tasks.owed_noop, owed=True),
            "plain": lambda: _round(bench, runs, tasks.plain_noop, owed=False),
        }
        found = interleaved(bench.rounds, sides)
    yield Comparison(
        name="throughput",
        against="plain acks_late Celery",
        unit="jobs/s",
        ours=found["ours"],
        theirs=found["plain"],
        bar=0.75,
    )


def _round(bench: Bench, runs: Path, task: object, *, owed: bool) -> float:
    jobs = bench.size(JOBS)
    # A new name each time: a worker that stops consuming a queue may still pop once from it.
    queue = f"{worker.QUEUE}-{next(_numbers)}"
    bench.empty()
    runs.write_bytes(b"")
    with transaction.atomic():
        for order in range(jobs):
            task.apply_async((order,), queue=queue)
    require(bench.valkey.llen(queue), jobs, "messages in the queue")
    worker.app.control.add_consumer(queue, destination=[worker.NODE], reply=True)
    rate = _drain(bench, queue, jobs)
    worker.app.control.cancel_consumer(queue, destination=[worker.NODE], reply=True)
    require(runs.stat().st_size, jobs, "bodies run")
    if owed:
        require(bench.entries("succeeded"), jobs, "entries succeeded")
    return rate


def _drain(bench: Bench, queue: str, jobs: int) -> float:
    """Acknowledged jobs per second, from the first fifth to the last: by then it is up to speed."""
    deadline = time.monotonic() + LONGEST
    at_speed, start = 0, 0.0
    while left := _left(bench, queue):
        if not at_speed and left <= jobs * 4 // 5:
            at_speed, start = left, time.perf_counter()
        if time.monotonic() > deadline:
            raise Void(f"{left} of {jobs} jobs were left after {LONGEST:g} s")
        time.sleep(0.02)
    return at_speed / (time.perf_counter() - start)


def _left(bench: Bench, queue: str) -> int:
    # Twice: between its pop and its entry in `unacked` a message is in neither.
    for _ in range(2):
        with bench.valkey.pipeline() as pipe:
            waiting, held = pipe.llen(queue).hlen("unacked").execute()
        if waiting + held:
            return int(waiting + held)
    return 0

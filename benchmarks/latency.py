"""From the commit to the first line of the task, with an idle worker, one job after the other.

The plain side is what teams write today: `transaction.on_commit(task.delay)`.
"""

import os
import time
from collections.abc import Callable, Iterator
from statistics import median

from django.db import transaction

from benchmarks import tasks, worker
from benchmarks.bench import Bench
from benchmarks.paired import Comparison, interleaved, require

SAMPLES = 100  # a round, and side


def measure(bench: Bench) -> Iterator[Comparison]:
    # Held open for writing too, or reading would end where no child has it open.
    starts = os.fdopen(os.open(os.environ[tasks.STARTS], os.O_RDWR), "rb", buffering=0)
    with starts, worker.running(bench.folder):

        def p50(job: Callable[[], None]) -> float:
            bench.empty()
            samples = bench.size(SAMPLES)
            return median(_sample(bench, starts, job) for _ in range(samples))

        def ours() -> float:
            found = p50(_owed)
            require(bench.entries("succeeded"), bench.size(SAMPLES), "entries succeeded")
            return found

        found = interleaved(bench.rounds, {"ours": ours, "plain": lambda: p50(_plain)})
    yield Comparison(
        name="latency p50",
        against="plain .delay() on commit",
        unit="ms",
        ours=found["ours"],
        theirs=found["plain"],
        bar=1.5,
        at_most=True,
    )


def _owed() -> None:
    tasks.owed_started.apply_async((1,), queue=worker.QUEUE)


def _plain() -> None:
    transaction.on_commit(lambda: tasks.plain_started.apply_async((1,), queue=worker.QUEUE))


def _sample(bench: Bench, starts: object, job: Callable[[], None]) -> float:
    committed: list[int] = []
    with transaction.atomic():
        transaction.on_commit(lambda: committed.append(time.monotonic_ns()))
        job()
    started = int(starts.readline())
    while bench.valkey.hlen("unacked"):  # acknowledged: the worker is idle again
        time.sleep(0.001)
    return (started - committed[0]) / 1e6

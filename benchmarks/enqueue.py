"""Entries per second in one transaction: `.delay()` against a bare INSERT and another outbox.

Up to the end of COMMIT. Ours publishes right after that, in the same process; that cost stands in
a line of its own, against the other outbox's enqueue, which leaves publishing to its relay.
"""

import os
from collections.abc import Iterator
from time import perf_counter

import psycopg
from django.db import transaction

from benchmarks import tasks, worker
from benchmarks.bench import Bench
from benchmarks.paired import Comparison, interleaved, require, timed
from benchmarks.peer import NAME
from outbox.clock import new_id

ENTRIES = 1_000

_INSERT = """
INSERT INTO celery_outbox_entry (id, task, args, queue, publish_after, root_id)
VALUES (%s, 'bench.owed_noop', %s, %s, STATEMENT_TIMESTAMP() + interval '1 second', %s)
"""


def measure(bench: Bench) -> Iterator[Comparison]:
    published: list[float] = []
    sides = {"ours": lambda: _ours(bench, published), "bare": lambda: _bare(bench)}
    if bench.peer:
        sides["peer"] = lambda: _peer(bench)
    found = interleaved(bench.rounds, sides)
    ours, unit = found["ours"], "entries/s"
    yield Comparison(
        name="enqueue", against="bare INSERT", unit=unit, ours=ours, theirs=found["bare"]
    )
    if not bench.peer:
        return
    peers = found["peer"]
    yield Comparison(name="enqueue", against=NAME, unit=unit, ours=ours, theirs=peers, bar=2)
    both = published[1:]  # without the warm-up
    yield Comparison(name="enqueue, publish", against=NAME, unit=unit, ours=both, theirs=peers)


def _ours(bench: Bench, published: list[float]) -> float:
    """Up to the commit; into `published` goes the rate with the publishing on commit."""
    bench.empty()
    entries = ENTRIES
    committed: list[float] = []
    start = perf_counter()
    with transaction.atomic():
        transaction.on_commit(lambda: committed.append(perf_counter()))
        for order in range(entries):
            tasks.owed_noop.apply_async((order,), queue=worker.QUEUE)
    published.append(entries / (perf_counter() - start))
    require(bench.entries("published"), entries, "entries published on commit")
    require(bench.valkey.llen(worker.QUEUE), entries, "messages in the queue")
    return entries / (committed[0] - start)


def _bare(bench: Bench) -> float:
    bench.empty()
    with psycopg.connect(os.environ["DATABASE_URL"]) as database:
        database.execute("SELECT 1")
        with timed() as watch:
            for order in range(ENTRIES):
                entry = new_id()
                database.execute(_INSERT, (entry, f"[{order}]", worker.QUEUE, entry))
            database.commit()
    require(bench.entries("pending"), ENTRIES, "rows inserted")
    return ENTRIES / watch.seconds


def _peer(bench: Bench) -> float:
    enqueued = bench.peer.ask("enqueue", ENTRIES)
    require(enqueued["done"], ENTRIES, "rows that the other outbox wrote")
    bench.peer.ask("relay", ENTRIES)
    return ENTRIES / enqueued["seconds"]

"""Due rows per second that one process publishes, against the raw limit and another relay."""

import os
from collections.abc import Iterator

import psycopg
import redis
from django.db import connection

from benchmarks import worker
from benchmarks.bench import Bench
from benchmarks.paired import Comparison, interleaved, require, timed
from benchmarks.peer import NAME
from outbox import sql
from outbox.clock import new_id
from outbox.conf import settings
from outbox.lifecycle import publish

ROWS = 10_000
PEER_ROWS = 1_000

# As enqueue leaves them, and due: no transaction's end has published them.
_OWE = """
INSERT INTO celery_outbox_entry (id, task, args, queue, root_id)
SELECT id, 'bench.owed_noop', '[42]', %s, id FROM unnest(%s::uuid[]) AS id
"""


def measure(bench: Bench) -> Iterator[Comparison]:
    sides = {"ours": lambda: _ours(bench), "raw": lambda: _raw(bench, message)}
    if bench.peer:
        sides["peer"] = lambda: _peer(bench)
    _ours(bench)
    message = bench.valkey.lindex(worker.QUEUE, 0)
    found = interleaved(bench.rounds, sides)
    common = {"name": "dispatch", "unit": "rows/s", "ours": found["ours"]}
    yield Comparison(**common, against="raw limit", theirs=found["raw"], bar=0.5)
    if bench.peer:
        yield Comparison(**common, against=NAME, theirs=found["peer"], bar=10)


def _owe(bench: Bench) -> int:
    bench.empty()
    rows = bench.size(ROWS)
    with connection.cursor() as cursor:
        cursor.execute(_OWE, [worker.QUEUE, [str(new_id()) for _ in range(rows)]])
    return rows


def _ours(bench: Bench) -> float:
    rows = _owe(bench)
    with timed() as watch:
        publish.dispatch(worker.app, using="default")
    _check(bench, rows)
    return rows / watch.seconds


def _raw(bench: Bench, message: bytes) -> float:
    """The same SELECT and UPDATE by psycopg, LPUSH of a ready message by redis-py, no more."""
    rows = _owe(bench)
    with psycopg.connect(os.environ["DATABASE_URL"]) as database:
        database.execute("SELECT 1")
        bench.valkey.ping()
        with timed() as watch:
            while _raw_batch(database, bench.valkey, message):
                pass
    _check(bench, rows)
    return rows / watch.seconds


def _raw_batch(database: psycopg.Connection, valkey: redis.Redis, message: bytes) -> int:
    with database.transaction(), valkey.pipeline(transaction=False) as pipe:
        read = database.execute(sql.DUE, {"limit": settings().BATCH_SIZE}).fetchall()
        for _ in read:
            pipe.lpush(worker.QUEUE, message)
        pipe.execute()
        seen = {"ids": [row[0] for row in read], "versions": [row[1] for row in read]}
        database.execute(sql.PUBLISH, seen)
    return len(read)


def _check(bench: Bench, rows: int) -> None:
    require(bench.valkey.llen(worker.QUEUE), rows, "messages in the queue")
    require(bench.entries("published"), rows, "entries published")


def _peer(bench: Bench) -> float:
    bench.empty()
    rows = bench.size(PEER_ROWS)
    bench.peer.ask("enqueue", rows)
    relayed = bench.peer.ask("relay", rows)
    require(relayed["done"], rows, "rows that the other relay published")
    require(bench.valkey.llen(worker.QUEUE), rows, "messages of the other relay")
    return rows / relayed["seconds"]

"""A pass of reconcile over a million queued messages, against the bare read of the same lists.

Each has its published row, as where a queue is deep and nothing is wrong. The memory is that of a
process of its own, and the pause is the longest that another client of the broker met meanwhile.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from uuid import UUID

from django.db import connection

from benchmarks import worker
from benchmarks.bench import Bench
from benchmarks.paired import Comparison, interleaved, require, timed
from outbox.brokers import redis
from outbox.lifecycle import publish
from outbox.lifecycle.reconcile import reconcile

ROWS = 1_000_000
PAGE = 20_000
ROUNDS = 3  # of memory and pauses: a process each
MEBIBYTES, MILLISECONDS = 150, 50  # the bars

_OWE = """
INSERT INTO celery_outbox_entry
  (id, task, args, queue, status, version, publishes, published_at, created_at, due_at)
SELECT gen_random_uuid(), 'bench.owed_noop', '[42]', %s, 'published', 1, 1, at, at, at
FROM generate_series(1, %s) AS n,
  LATERAL (SELECT now() - interval '2 minutes' + n * interval '1 microsecond' AS at) AS times
"""


def measure(bench: Bench) -> Iterator[Comparison]:
    rows = bench.size(ROWS)
    _fill(bench, rows)
    sides = {"ours": lambda: _ours(rows), "bare": lambda: _bare(rows)}
    found = interleaved(bench.rounds, sides)
    common = {"unit": "s", "at_most": True, "bar": 1.5}
    yield Comparison(
        name="reconcile", against="bare read", ours=found["ours"], theirs=found["bare"], **common
    )
    children = [_child(rows) for _ in range(min(ROUNDS, bench.rounds))]
    for name, unit, bar in (("memory", "MiB", MEBIBYTES), ("pause", "ms", MILLISECONDS)):
        figures = [child[name] for child in children]
        limits = [float(bar)] * len(figures)
        yield Comparison(
            name=f"reconcile {name}",
            against="its bar",
            unit=unit,
            ours=figures,
            theirs=limits,
            bar=1,
            at_most=True,
        )
    bench.empty()


def _fill(bench: Bench, rows: int) -> None:
    """As many published rows as messages, each message as the library itself renders it."""
    bench.empty()
    with connection.cursor() as cursor:
        cursor.execute(_OWE, [worker.QUEUE, rows])
        cursor.execute("VACUUM ANALYZE celery_outbox_entry")
        cursor.execute("SELECT id FROM celery_outbox_entry ORDER BY published_at")
        ids = [row[0] for row in cursor.fetchall()]
    of = str(ids[0]).encode()
    message = _message(bench, ids[0])
    for start in range(0, rows, PAGE):
        texts = (str(one).encode() for one in ids[start : start + PAGE])
        bench.valkey.lpush(worker.QUEUE, *(message.replace(of, text) for text in texts))


def _message(bench: Bench, one: UUID) -> bytes:
    """A real message, of that entry."""
    back = "UPDATE celery_outbox_entry SET status = %s, published_at = created_at WHERE id = %s"
    with connection.cursor() as cursor:
        cursor.execute(back, ["pending", one])
        publish.dispatch(worker.app, using="default")
        cursor.execute(back, ["published", one])
    raw: bytes = bench.valkey.rpop(worker.QUEUE)
    return raw


def _ours(rows: int) -> float:
    with timed() as watch:
        found = reconcile(worker.app, using="default")
    require(found.queued, rows, "messages looked at")
    wrong = {name: count for name, count in asdict(found).items() if count and name != "queued"}
    require(wrong, {}, "findings where nothing is wrong")
    return watch.seconds


def _bare(rows: int) -> float:
    """The same reads of the same lists, and nothing else."""
    read = 0
    with redis.looking(worker.app) as look, timed() as watch:
        for key in redis._keys(look.channel, worker.QUEUE):
            start = 0
            while raws := look.client.lrange(key, start, start + redis.LONGEST - 1):
                start += len(raws)
            read += start
    require(read, rows, "messages read")
    return watch.seconds


def _child(rows: int) -> dict[str, float]:
    """A pass in a process of its own: the MiB that it grew by, and the broker's longest pause."""
    with _pinging() as longest:
        argv = [sys.executable, "-m", "benchmarks.reconcile_child"]
        found = json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout)
    require(found["queued"], rows, "messages looked at by the process")
    return {"memory": found["mebibytes"], "pause": longest[0]}


@contextmanager
def _pinging() -> Iterator[list[float]]:
    """Another client, in a process of its own; its longest wait in ms is there when it ended."""
    longest: list[float] = []
    argv = [sys.executable, str(Path(__file__).with_name("reconcile_pings.py"))]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        other.stdout.readline()  # it has begun
        yield longest
        longest.append(float(other.communicate("stop\n")[0]))

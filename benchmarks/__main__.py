"""`python -m benchmarks`: run the measurements, print a table, write JSON."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import django
import psycopg
from django.core.management import call_command

from outbox.embedded import Servers, servers

FOLDER = Path(__file__).resolve().parent.parent / ".run" / "bench"
NAMES = ("throughput", "dispatch", "enqueue", "latency", "recovery", "reconcile")
PACKAGES = ("celery", "kombu", "redis", "Django", "psycopg")
LINE = "{:<17} {:<28} {:>9} {:>9} {:<9} {:>6} {:>7}  {}"


def main() -> int:
    given = _arguments()
    with servers(FOLDER) as running:
        _prepare(running)
        found, void = _measure(given, running)
    report = {**_machine(given), "void": void, "measurements": found}
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nWritten to {given.output}")
    return 1 if void else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, metavar="N", help="paired rounds (9; quick: 3)")
    parser.add_argument("--only", action="append", choices=NAMES, help="this one; repeatable")
    parser.add_argument("--quick", action="store_true", help="a fifth of the work, weak figures")
    parser.add_argument("--output", type=Path, default=FOLDER / "results.json", metavar="FILE")
    given = parser.parse_args()
    given.rounds = given.rounds or (3 if given.quick else 9)
    return given


def _prepare(running: Servers) -> None:
    runs, starts = FOLDER / "runs", FOLDER / "starts"
    runs.touch()
    starts.unlink(missing_ok=True)
    os.mkfifo(starts)
    own = {"DJANGO_SETTINGS_MODULE": "benchmarks.settings", "BENCH_RUNS": str(runs)}
    os.environ.update({**running.environment, **own, "BENCH_STARTS": str(starts)})
    django.setup()
    call_command("migrate", verbosity=0)


def _measure(given: argparse.Namespace, running: Servers) -> tuple[list[Any], list[str]]:
    # Imported here: models cannot be imported before Django is set up.
    from benchmarks.bench import Bench
    from benchmarks.paired import Void
    from benchmarks.peer import peer

    found: list[Any] = []
    void: list[str] = []
    print(LINE.format("", "against", "ours", "theirs", "", "ratio", "bound", "bar"), flush=True)
    with peer(FOLDER, database=_peers_database(running), broker=running.valkey.url) as other:
        bench = Bench(folder=FOLDER, rounds=given.rounds, quick=given.quick, peer=other)
        for name in given.only or NAMES:
            try:
                for comparison in import_module(f"benchmarks.{name}").measure(bench):
                    found.append(comparison.as_json())
                    print(_line(found[-1]), flush=True)
            except Void as error:
                void.append(f"{name}: {error}")
                print(f"{name:<17} void: {error}", flush=True)
    return found, void


def _peers_database(running: Servers) -> str:
    with psycopg.connect(running.postgres.url, autocommit=True) as database:
        if not database.execute("SELECT FROM pg_database WHERE datname = 'peer'").rowcount:
            database.execute("CREATE DATABASE peer")
    return running.postgres.url.rpartition("/")[0] + "/peer"


def _line(found: dict[str, Any]) -> str:
    ours, theirs = (f"{median(found[side]):,.4g}" for side in ("ours", "theirs"))
    bar = ""
    if found["bar"] is not None:
        sign, word = "≤" if found["at_most"] else "≥", "met" if found["met"] else "MISSED"
        bar = f"{sign} {found['bar']:g} {word}"
    ratio, bound = f"{found['ratio']:.2f}", f"{found['bound']:.2f}"
    return LINE.format(
        found["name"], found["against"], ours, theirs, found["unit"], ratio, bound, bar
    )


def _machine(given: argparse.Namespace) -> dict[str, Any]:
    packages: Sequence[str] = PACKAGES
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "rounds": given.rounds,
        "quick": given.quick,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "packages": {package: version(package) for package in packages},
    }


if __name__ == "__main__":
    sys.exit(main())

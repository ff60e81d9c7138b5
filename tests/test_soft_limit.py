"""The soft time limit is the body's alone: a claim and an ending never see its exception."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from outbox import maintenance
from outbox.drill.processes import Process
from outbox.failpoints import VARIABLE, Failpoint
from outbox.states import State
from outbox.worker import soft_limit
from tests import tasks
from tests.following import APP, ended, entry_of
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Process]


def limit_is_met(worker: Process) -> None:
    wait_until(lambda: "Soft time limit (1s) exceeded" in worker.tail(100), timeout=30)


def test_the_body_can_leave_in_order(start_worker: Start, tmp_path: Path) -> None:
    start_worker()
    entry = ended(tasks.softly.delay(str(tmp_path / "notes"), str(tmp_path / "never")))
    assert (entry.status, entry.result) == (State.SUCCEEDED, "in order")


def test_an_ending_is_recorded_though_the_limit_is_met_meanwhile(
    start_worker: Start, tmp_path: Path
) -> None:
    marker, until = tmp_path / "marker", tmp_path / "until"
    until.touch()
    worker = start_worker("-c", "1", **{VARIABLE: f"{Failpoint.RETURNED}={marker}"})
    result = tasks.softly.delay(str(tmp_path / "notes"), str(until))
    limit_is_met(worker)
    marker.unlink()
    entry = ended(result)
    assert (entry.status, entry.result, entry.failures) == (State.SUCCEEDED, "done", 0)
    after = tasks.add.delay(1, 2)  # nor does the next job hear of it
    wait_until(marker.exists, timeout=30)
    marker.unlink()
    assert ended(after).result == 3


def test_a_run_whose_time_was_over_before_it_began_is_given_back(
    start_worker: Start, tmp_path: Path
) -> None:
    """Its claim may have waited for the database: that is not the task's fault."""
    marker, until, notes = (tmp_path / name for name in ("marker", "until", "notes"))
    until.touch()
    worker = start_worker("-c", "1", **{VARIABLE: f"{Failpoint.CLAIMED}={marker}"})
    result = tasks.softly.delay(str(notes), str(until))
    limit_is_met(worker)
    marker.unlink()
    wait_until(lambda: entry_of(result).releases == 1)
    assert not notes.exists()

    def has_run() -> bool:
        maintenance.dispatch(APP, using="default")
        marker.unlink(missing_ok=True)  # its second claim stands there too
        return entry_of(result).status == State.SUCCEEDED

    wait_until(has_run, timeout=30)
    entry = entry_of(result)
    assert (entry.attempts, entry.failures, entry.releases) == (2, 0, 1)


def test_inside_a_delivery_the_signal_is_noted_and_in_the_body_it_raises() -> None:
    class Limit(Exception):
        pass

    def theirs(*_: object) -> None:
        raise Limit

    before = signal.signal(signal.SIGUSR1, theirs)
    soft_limit._installed_in = 0
    try:
        with soft_limit.kept_out():
            with soft_limit.let_in(), pytest.raises(Limit):
                signal.raise_signal(signal.SIGUSR1)
            assert not soft_limit.is_over()
            signal.raise_signal(signal.SIGUSR1)
            assert soft_limit.is_over()
        with pytest.raises(Limit):  # a plain task's, as ever
            signal.raise_signal(signal.SIGUSR1)
        with soft_limit.kept_out():
            assert not soft_limit.is_over()
    finally:
        signal.signal(signal.SIGUSR1, before)

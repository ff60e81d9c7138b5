"""Ticks as leases: any number of beats, workers and commands, and one run at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any
from uuid import uuid4

import pytest
import redis
from django.db import connection

from outbox import contact, maintenance, ticks
from outbox.errors import Overtaken
from outbox.models import OutboxTick
from tests import tasks
from tests.factories import PAST, ago, at
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

APP = tasks.add.app


def tick() -> OutboxTick:
    return OutboxTick.objects.get(name="reconcile")


def run(work: Any = lambda renew: {}, **how: Any) -> ticks.Found | None:
    return ticks.run_alone("reconcile", work, **{"lease": 60, "using": "default", **how})


def test_one_runs_and_the_others_leave_it_to_it() -> None:
    assert run(lambda renew: {"other": run()}) == {"other": None}
    assert run() == {}


def test_a_run_that_outlives_its_lease_renews_it_and_keeps_the_others_out() -> None:
    def work(renew: ticks.Renew) -> ticks.Found:
        first = tick().lease_until
        others = []

        def renewed() -> bool:
            renew()
            others.append(run())
            until = tick().lease_until
            assert first is not None
            assert until is not None
            return (until - first).total_seconds() > 0.6

        wait_until(renewed)  # more than two leases long
        return {"others": [other for other in others if other is not None]}

    assert run(work, lease=0.3) == {"others": []}


def test_a_run_that_could_not_renew_in_time_leaves_and_records_nothing() -> None:
    """It was stopped, say, and another one has taken over meanwhile."""

    def work(renew: ticks.Renew) -> ticks.Found:
        OutboxTick.objects.update(lease_until=at(PAST))
        assert run(lambda _: {"it": "took over"}) == {"it": "took over"}
        OutboxTick.objects.update(lease_owner=uuid4(), lease_until=ago(seconds=-60))
        with pytest.raises(Overtaken):
            wait_until(renew)
        raise Overtaken

    assert run(work, lease=0.1) is None
    after = tick()
    assert after.findings == {"it": "took over"}
    assert after.lease_owner is not None  # the other one's


def test_a_run_that_ends_late_takes_no_other_ones_lease_away() -> None:
    """Both are children of one worker: they share its boot."""
    began, may_end = threading.Event(), threading.Event()

    def sibling() -> None:
        def work(renew: ticks.Renew) -> ticks.Found:
            began.set()
            assert may_end.wait(15)
            return {"the other": "one"}

        run(work)
        connection.close()

    other = threading.Thread(target=sibling)

    def work(renew: ticks.Renew) -> ticks.Found:
        OutboxTick.objects.update(lease_until=at(PAST))
        other.start()
        assert began.wait(15)
        return {"too": "late"}

    run(work)
    assert tick().findings == {}
    assert run() is None  # the other one has it still
    may_end.set()
    other.join()
    assert tick().findings == {"the other": "one"}


def test_a_run_that_fails_keeps_nobody_out() -> None:
    def work(renew: ticks.Renew) -> ticks.Found:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(work)
    assert run() == {}


def test_any_number_of_beats_make_one_run_a_round(valkey: redis.Redis) -> None:
    found = [maintenance.reconcile(APP, using="default") for _ in range(3)]
    assert [one is None for one in found] == [False, True, True]
    assert maintenance.reconcile(APP, using="default", anew=True) is not None  # a person asks


def test_a_run_that_takes_most_of_a_round_does_not_cost_the_next_one() -> None:
    """The tests' round is 1 s: what began 0.9 s ago is long enough ago, whenever it ended."""
    run()
    OutboxTick.objects.update(last_at=at(), duration=ago(seconds=0) - ago(seconds=0.9))
    assert run(apart=0.5) == {}


def test_a_tick_of_the_future_is_long_ago() -> None:
    """The database's clock was set back: nothing is to wait until it is there again."""
    run()
    OutboxTick.objects.update(last_at=ago(hours=-1))
    assert ticks.late_in("reconcile", 60, using="default") == 0
    assert run(lambda renew: {"after": "all"}, apart=0.5) == {"after": "all"}
    assert 59 < ticks.late_in("reconcile", 60, using="default") <= 60


def test_a_lease_that_ends_later_than_any_could_is_free() -> None:
    run()
    OutboxTick.objects.update(lease_owner=uuid4(), lease_until=ago(seconds=-50))
    assert run(lease=60) is None
    OutboxTick.objects.update(lease_until=ago(hours=-1))
    assert run(lambda renew: {"it": "runs"}, lease=60) == {"it": "runs"}


def test_a_run_whose_lease_another_took_after_the_clock_was_set_back_is_overtaken() -> None:
    def work(renew: ticks.Renew) -> ticks.Found:
        OutboxTick.objects.update(lease_until=ago(hours=-1))
        assert run(lambda _: {"it": "took over"}, lease=0.1) == {"it": "took over"}
        wait_until(renew)
        return {}

    assert run(work, lease=0.1) is None
    assert tick().findings == {"it": "took over"}


def test_word_of_the_future_lets_sweeps_crash_the_dead_again_after_a_lease() -> None:
    contact.leave_word(using="default")
    OutboxTick.objects.update(last_at=ago(hours=-1), unbroken_since=ago(hours=-1))
    assert contact.unbroken_for(using="default") == 0
    contact.leave_word(using="default")
    left = OutboxTick.objects.get(name="contact")
    assert left.last_at is not None
    assert left.last_at < ago(seconds=-9)
    assert 0 <= contact.unbroken_for(using="default") < 9


def test_findings_and_duration_are_recorded(valkey: redis.Redis) -> None:
    found = maintenance.reconcile(APP, using="default")
    assert found is not None
    assert tick().findings == dict(found)
    assert tick().duration is not None


_HANG = """
import django, sys, time
django.setup()
from outbox import contact, maintenance, ticks
from outbox.lifecycle import reconcile
from tests.tasks import add

def hang(*args, **how):
    print("taken", flush=True)
    time.sleep(60)

reconcile.reconcile = hang
maintenance.reconcile(add.app, using="default")
"""


def test_a_reconciler_that_is_killed_keeps_the_others_out_for_two_rounds_at_most(
    surroundings: dict[str, str], valkey: redis.Redis
) -> None:
    argv = [sys.executable, "-c", _HANG]
    with subprocess.Popen(argv, env={**os.environ, **surroundings}, stdout=subprocess.PIPE) as hung:
        assert hung.stdout is not None
        assert hung.stdout.readline() == b"taken\n"
        hung.send_signal(signal.SIGKILL)
    assert maintenance.reconcile(APP, using="default") is None
    wait_until(lambda: maintenance.reconcile(APP, using="default"), timeout=3)  # rounds of 1 s

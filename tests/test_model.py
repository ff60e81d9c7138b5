"""Random verbs, workers, crashes, forgetting and time: the entries do what the contract says.

Hypothesis draws the steps. After each, every row is compared with `tests/model.py` and checked
against the rules of `tests/invariants.py`. `HYPOTHESIS_PROFILE=long` looks for minutes on end.
Races are not drawn: they have tests of their own. What is drawn are their outcomes, such as a
worker that writes long after it lost its run.
"""

from __future__ import annotations

import logging
import os
from copy import deepcopy
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from outbox import transitions
from outbox.lifecycle import lease, operate
from outbox.lifecycle.cancel import cancel
from outbox.models import OutboxEntry
from outbox.transitions import Ending
from tests import calls
from tests.calls import USING
from tests.drawing import (
    ALWAYS,
    DELAY,
    EFFECT,
    LATE_SIGHTINGS,
    RUNS,
    RUNS_WITH_EFFECTS,
    SIGHTINGS,
    TERMS,
    ZOMBIES,
    Call,
    Target,
    entries,
    in_state,
    next_step,
    step,
    sweep,
)
from tests.invariants import (
    FOLLOW,
    INTERNAL,
    Seen,
    broken,
    broken_by_step,
    differences,
    look,
    shared_keys,
    still_said,
)
from tests.model import (
    CANCELLED,
    FAILED,
    FINAL,
    GONE,
    PENDING,
    PUBLISHED,
    RUNNING,
    UNCERTAIN,
    WAITING,
    Row,
    Run,
    Terms,
)

COMMON: dict[str, Any] = {
    "deadline": None,
    # The same steps in every CI run: it must not turn red for what a change has not touched.
    "derandomize": "CI" in os.environ,
    "print_blob": True,
    "phases": set(Phase) - {Phase.explain},  # it would run each failure many times more
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much],
}
settings.register_profile("ordinary", max_examples=150, stateful_step_count=40, **COMMON)
settings.register_profile("long", max_examples=600, stateful_step_count=60, **COMMON)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ordinary")

MOST_ENTRIES = 3  # few, so that much happens to each
WORKERS = {number: UUID(int=0xB00 + number) for number in (1, 2)}
# Steps after which an unsynced claim may still be forgotten: the others wait for the disk.
UNSYNCED = {"claim", "pass_time", "forget"}

WRITES = st.sampled_from(["publish", "strand", "strand", "handoff", "reject"])
# What may be claimed, and what is too late by now.
CLAIMS = entries(
    lambda life, row: (
        row.is_claimable(now=life.now) or (row.status in WAITING and row.is_too_late(at=life.now))
    )
)
# Cancelled, and their run goes on.
CALLED_OFF = entries(lambda life, row: row.is_leased and row.status == CANCELLED)
# Parked with an effect whose outcome is unknown.
IN_DOUBT = entries(lambda life, row: row.has_begun() and row.status == UNCERTAIN)
ENDINGS = st.sampled_from(["succeed", "retry", "fail", "park"])
SETTLED = st.one_of(st.none(), st.none(), EFFECT)
LOSSES = st.sampled_from(["crash", "crash", "release", "settle"])
FREE_NUMBERS = Target(lambda life: range(MOST_ENTRIES - len(life.rows)), lambda life: [])
FORGETTABLE = Target(lambda life: range(len(life.unsynced)), lambda life: [])


class Life(RuleBasedStateMachine):
    """The library on one side, the model on the other."""

    def __init__(self) -> None:
        super().__init__()
        calls.clear()
        self.now = self.latest_entry = 0
        self.step = ""
        self.rows: dict[int, Row] = {}
        self.seen: dict[int, Seen] = {}
        self.runs: dict[int, Run] = {}
        self.sightings: dict[int, OutboxEntry] = {}
        # Of each claim that a killed database may forget, the entry as it was.
        self.unsynced: list[tuple[int, dict[str, Any], Row, int]] = []

    def row(self, entry: int) -> Row:
        return self.rows.get(entry) or Row(Terms(), status=GONE)

    def goes_on(self, run: int) -> bool:
        token = self.row(self.runs[run].entry).claim_token
        return token == self.runs[run].token and self.row(self.runs[run].entry).is_leased

    def key_is_free(self, terms: Terms) -> bool:
        live = {(row.terms.task, row.unique_key) for row in self.rows.values()}
        return terms.key is None or (terms.task, terms.key) not in live

    def agree(self, step: str, answer: Any, *, due: Any) -> None:
        self.step = step
        assert answer == due, f"{step} answers {answer!r}, not {due!r}"

    @invariant()
    def holds(self) -> None:
        seen = look()
        assert seen.keys() == self.rows.keys(), "an entry is missing, or there is one too many"
        for number, found in seen.items():
            wrong = [*differences(self.rows[number], found, now=self.now), *broken(found)]
            if number in self.seen:
                wrong += broken_by_step(self.seen[number], found, step=self.step)
            assert not wrong, f"entry {number} after {self.step}: {'; '.join(wrong)}"
        assert not shared_keys(seen.values())
        erased = [UUID(int=number) for number, row in self.rows.items() if row.erased]
        assert not still_said(erased), "what was erased is written down again"
        if self.step not in UNSYNCED and seen != self.seen:
            self.unsynced.clear()
        self.seen, self.step = seen, ""

    @rule(call=st.deferred(next_step))
    def then(self, call: Call) -> None:
        getattr(self, call.method)(**call.arguments)

    # Producers.

    @sweep(3, FREE_NUMBERS, terms=TERMS)
    def enqueue(self, terms: Terms) -> None:
        number, due = self.latest_entry + 1, self.key_is_free(terms)
        self.agree("enqueue", calls.enqueue(number, terms), due=due)
        if due:
            self.rows[number] = Row.owed(terms, now=self.now)
            self.latest_entry = number

    @step(1, in_state(PENDING), terms=TERMS)
    def enqueue_again(self, number: int, terms: Terms) -> None:
        """An ID that is taken."""
        if number in self.rows:
            self.agree("enqueue", calls.enqueue(number, terms), due=False)

    # Dispatcher and reconcile, by the version that they read: at once, or late.

    @step(4, in_state(PENDING))
    def publish(self, number: int) -> None:
        self._act("publish", calls.read(number))

    @step(2, in_state(PUBLISHED))
    def strand(self, number: int) -> None:
        self._act("strand", calls.read(number))

    @step(3, in_state(PENDING, PUBLISHED))
    def read(self, number: int) -> None:
        self.step = "read"
        self.sightings[len(self.sightings) + 1] = calls.read(number)

    @step(4, LATE_SIGHTINGS, verb=WRITES)
    @step(4, SIGHTINGS, verb=WRITES)
    def act_on_what_was_read(self, number: int, verb: str) -> None:
        self._act(verb, self.sightings[number])

    def _act(self, verb: str, read: OutboxEntry) -> None:
        due = self.row(read.pk.int).act(verb, version=read.version, now=self.now)
        self.agree(verb, calls.act(read, verb), due=due)

    @step(1, in_state(PUBLISHED), missing=st.booleans())
    def mark_missing(self, number: int, missing: bool) -> None:
        due = self.row(number).mark_missing(missing=missing)
        self.agree("mark_missing", calls.mark_missing(number, missing=missing), due=due)

    # Workers, and what they still write when they have long lost their run.

    @step(
        8,
        CLAIMS,
        worker=st.sampled_from(sorted(WORKERS)),
        pid=st.sampled_from([1, 2]),
        task=st.sampled_from(["", "", "", "", "unheard of"]),
    )
    def claim(self, number: int, worker: int, pid: int, task: str) -> None:
        token = UUID(int=0xC00 + len(self.runs) + 1)
        self.runs[len(self.runs) + 1] = run = Run(number, token, WORKERS[worker], pid)
        self._claim(run, task=task or self.row(number).terms.task)

    @step(1, RUNS)
    def claim_again(self, number: int) -> None:
        """The reply to the first claim was lost."""
        again = self.runs[number]
        self._claim(again, task=self.row(again.entry).terms.task)

    def _claim(self, run: Run, *, task: str) -> None:
        row = self.row(run.entry)
        terms, before = row.terms, (run.entry, calls.remember(run.entry), deepcopy(row), self.now)
        due = (row.attempts, row.failures) if row.claim(run, task=task, now=self.now) else None
        self.agree("claim", calls.claim(run, terms=terms, task=task), due=due)
        if due and terms.is_synced:
            self.unsynced.clear()
        elif due:
            self.unsynced.append(before)

    @step(3, entries(lambda life, row: row.is_leased), worker=st.sampled_from(sorted(WORKERS)))
    def renew(self, number: int, worker: int) -> None:
        due = self.row(number).renew(owner=WORKERS[worker], now=self.now)
        self.agree("renew", calls.renew(number, owner=WORKERS[worker]), due=due)

    @step(6, RUNS_WITH_EFFECTS, how=st.sampled_from(["fail", "park"]), delay=DELAY)
    @step(6, ZOMBIES, how=ENDINGS, delay=DELAY)
    @step(8, RUNS, how=ENDINGS, delay=DELAY)
    def end(self, number: int, how: str, delay: int) -> None:
        """By the owner, by one that was, or a second time since the reply was lost."""
        ending = self.runs[number]
        row, before = self.row(ending.entry), calls.read(ending.entry)
        due = row.end(how, token=ending.token, delay=delay, now=self.now)
        answer = calls.end(ending, how, delay=delay)
        self.agree(how, answer.value, due=due)
        mine = before.claim_token == ending.token
        assert mine or answer is Ending.REFUSED, "a token that is not the row's ended a run"

    @step(2, RUNS, how=st.sampled_from(["release", "settle"]))
    def give_back(self, number: int, how: str) -> None:
        self._lose(self.runs[number], how, by_token=True)

    @step(2, ZOMBIES, how=LOSSES)
    @step(4, RUNS, how=LOSSES)
    def lose_child(self, number: int, how: str) -> None:
        """By owner and PID: the child may have run another copy by then."""
        self._lose(self.runs[number], how, by_token=False)

    def _lose(self, run: Run, how: str, *, by_token: bool) -> None:
        row = self.row(run.entry)
        due = row.is_held_by(run, by_token=by_token) and row.lose(how, now=self.now)
        self.agree(how, calls.lose(run, how, by_token=by_token), due=due)
        if how == "crash" and due:
            calls.take_the_jitter_out(run.entry)

    @step(3, RUNS, budget=st.sampled_from([2, 2, 1, None]), delay=DELAY)
    def time_out(self, number: int, budget: int | None, delay: int) -> None:
        run, due = self.runs[number], None
        row = self.row(run.entry)
        if row.is_held_by(run, by_token=False):
            due = row.time_out(budget=budget, delay=delay, now=self.now)
        self.agree("timeout", calls.time_out(run, budget=budget, delay=delay), due=due)

    @step(1, in_state(PUBLISHED), delay=DELAY)
    def decline(self, number: int, delay: int) -> None:
        due = self.row(number).decline(delay=delay, now=self.now)
        self.agree("decline", calls.decline(number, delay=delay), due=due)

    @step(5, in_state(RUNNING), name=EFFECT)
    def begin_effect(self, number: int, name: str) -> None:
        row = self.row(number)
        if row.status == RUNNING and row.effects.get(name, "cleared") == "cleared":
            assert row.claim_token
            self.step, row.effects[name] = "begin_effect", "begun"
            calls.begin_effect(number, name, token=row.claim_token)

    @step(1, entries(lambda life, row: row.has_begun()), name=EFFECT)
    def finish_effect(self, number: int, name: str) -> None:
        """By whoever began it, whatever became of the entry."""
        if self.row(number).effects.get(name) == "begun":
            self.step, self.row(number).effects[name] = "finish_effect", "done"
            calls.finish_effect(number, name)

    # Sweeps.

    @sweep(5, entries(lambda life, row: row.is_leased))
    def crash_lapsed(self) -> None:
        lapsed = [number for number, row in self.rows.items() if row.is_lapsed(now=self.now)]
        crashed = [number for number in lapsed if self.rows[number].crash(now=self.now)]
        self.agree("crash", lease.crash_lapsed(using=USING), due=len(crashed))
        for number in crashed:
            calls.take_the_jitter_out(number)

    @sweep(5, CALLED_OFF)
    def settle_abandoned(self) -> None:
        lapsed = [row for row in self.rows.values() if row.is_lapsed(now=self.now)]
        due = sum(row.settle() for row in lapsed)
        self.agree("settle", lease.settle_abandoned(using=USING), due=due)

    @sweep(5, entries(lambda life, row: row.is_too_late(at=life.now)))
    def expire(self) -> None:
        due = sum(row.expire(now=self.now) for row in self.rows.values())
        self.agree("expire", lease.expire_late(using=USING), due=due)

    @sweep(2, in_state(*FINAL), limit=st.sampled_from([1, 9]))
    def prune(self, limit: int) -> None:
        due = [number for number, row in sorted(self.rows.items()) if row.may_be_pruned()][:limit]
        self.rows = {number: row for number, row in self.rows.items() if number not in due}
        rows = OutboxEntry.objects.exclude(task__in=INTERNAL)
        self.agree("prune", transitions.prune(rows, limit=limit), due=len(due))

    # People.

    @step(4, in_state(RUNNING, UNCERTAIN))
    def cancel(self, number: int) -> None:
        answer = cancel(UUID(int=number), actor="tests")
        self.agree("cancel", answer, due=self.row(number).cancel())

    @step(6, IN_DOUBT, effect=EFFECT, happened=st.booleans())
    @step(4, in_state(UNCERTAIN), effect=SETTLED, happened=st.booleans())
    def resolve(self, number: int, effect: str | None, happened: bool) -> None:
        due = self.row(number).resolve(effect=effect, happened=happened, now=self.now)
        asked: dict[str, Any] = {"effect": effect, "happened": happened, "actor": "tests"}
        self.agree("resolve", operate.resolve(UUID(int=number), **asked), due=due)

    @step(3, CALLED_OFF)
    @step(5, in_state(FAILED, CANCELLED))
    def requeue(self, number: int) -> None:
        row = self.row(number)
        due = row.requeue(now=self.now, key_is_free=self.key_is_free(row.terms))
        self.agree("requeue", operate.requeue(UUID(int=number), actor="tests"), due=due)

    @step(1, in_state(PENDING))
    def run_now(self, number: int) -> None:
        due = self.row(number).run_now(now=self.now)
        self.agree("run_now", operate.run_now(UUID(int=number), actor="tests"), due=due)

    @step(1, in_state(*FINAL))
    def erase(self, number: int) -> None:
        row = self.row(number)
        row.cancel()
        subject = calls.subject(number)
        # What follows it says things about the same: an errback's exception.
        following = OutboxEntry.objects.filter(task=FOLLOW, subject=subject).count()
        due = int(row.erase()) + following
        self.agree("erase", operate.erase(subject=subject, actor="tests"), due=due)

    # Time, and a database that was killed.

    @sweep(4, ALWAYS, hours=st.sampled_from([1, 3, 6, 24]))
    def pass_time(self, hours: int) -> None:
        self.step = "pass_time"
        self.now += hours
        calls.let_pass(OutboxEntry.objects.all(), hours=hours)

    @sweep(4, FORGETTABLE)
    def forget(self) -> None:
        """The latest commits, claims all of them, never reached the disk."""
        self.step = "forget"
        for number, columns, row, at in reversed(self.unsynced):
            calls.restore(number, columns, after=self.now - at)
            self.rows[number] = row
            self.seen.pop(number, None)
        self.unsynced.clear()


@pytest.mark.slow
@pytest.mark.timeout(0 if PROFILE == "long" else 600)  # a failure is made small before it is told
@pytest.mark.django_db(transaction=True)
def test_entries_do_what_the_contract_says_whatever_happens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, logger="outbox")  # thousands of steps hide the last ones
    run_state_machine_as_test(Life, settings=settings.get_profile(PROFILE))

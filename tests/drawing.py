"""What the model test draws: steps by their weight, mostly on entries and runs that they move.

Hypothesis turns about half of a machine's rules off in each example. Here a life needs most of
them to become long, so that the test is a machine of one rule, which draws among these steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st

from outbox.models import OutboxEntry
from tests.model import WAITING, Row, Run, Terms


class Lives(Protocol):
    """What a step may look at before it is drawn."""

    now: int
    latest_entry: int
    rows: dict[int, Row]
    runs: dict[int, Run]
    sightings: dict[int, OutboxEntry]

    def row(self, number: int) -> Row: ...

    def goes_on(self, number: int) -> bool: ...


Method = TypeVar("Method", bound=Callable[..., None])
Numbers = Callable[[Any], Iterable[int]]


@dataclass(frozen=True)
class Target:
    """Numbers of entries, runs or sightings: those that a step would move, and all there are."""

    likely: Numbers
    possible: Numbers

    def draw(self) -> st.SearchStrategy[int]:
        def choose(life: Lives) -> st.SearchStrategy[int]:
            likely, possible = {*self.likely(life)}, st.sampled_from([*self.possible(life)])
            if not likely:
                return possible
            rather = possible.filter(lambda number: number in likely)
            return st.sampled_from([rather] * 3 + [possible]).flatmap(lambda numbers: numbers)

        return st.runner().flatmap(choose)


@dataclass(frozen=True)
class Step:
    """A method of the machine, how often it is drawn where it has a target, and its arguments."""

    method: str
    weight: int
    target: Target
    arguments: Mapping[str, st.SearchStrategy[Any]]

    def weigh(self, life: Lives) -> int:
        likely, possible = [*self.target.likely(life)], [*self.target.possible(life)]
        return self.weight if likely else min(1, len(possible))


@dataclass(frozen=True)
class Call:
    """A step with its arguments, as a failing example shows it."""

    method: str
    arguments: Mapping[str, Any]

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"{self.method}({given})"


STEPS: list[Step] = []


def step(
    weight: int, target: Target, **arguments: st.SearchStrategy[Any]
) -> Callable[[Method], Method]:
    """Draw this method, with the number of a target and what else it takes."""
    return _register(weight, target, {"number": target.draw(), **arguments})


def sweep(
    weight: int, target: Target, **arguments: st.SearchStrategy[Any]
) -> Callable[[Method], Method]:
    """Likewise a method that finds its targets by itself."""
    return _register(weight, target, arguments)


def _register(
    weight: int, target: Target, arguments: Mapping[str, st.SearchStrategy[Any]]
) -> Callable[[Method], Method]:
    def register(method: Method) -> Method:
        STEPS.append(Step(method.__name__, weight, target, arguments))
        return method

    return register


def next_step() -> st.SearchStrategy[Call]:
    """Of a list that does not depend on the life so far: else no failing example gets small."""
    tickets = [(index, nth) for index, step in enumerate(STEPS) for nth in range(step.weight)]
    # Hypothesis likes what comes first: let that be what moves something, by its weight.
    tickets.sort(key=lambda ticket: (ticket[1] == 0, -STEPS[ticket[0]].weight))

    def choose(life: Lives) -> st.SearchStrategy[Call]:
        weights = [step.weigh(life) for step in STEPS]
        valid = st.sampled_from(tickets).filter(lambda ticket: ticket[1] < weights[ticket[0]])
        return valid.flatmap(lambda ticket: _with_arguments(STEPS[ticket[0]]))

    return st.runner().flatmap(choose)


def _with_arguments(step: Step) -> st.SearchStrategy[Call]:
    return st.builds(Call, st.just(step.method), st.fixed_dictionaries({**step.arguments}))


def entries(likely: Callable[[Any, Row], bool]) -> Target:
    return Target(
        lambda life: [number for number, row in life.rows.items() if likely(life, row)],
        lambda life: range(1, life.latest_entry + 1),
    )


def in_state(*states: str) -> Target:
    return entries(lambda life, row: row.status in states)


ALWAYS = Target(lambda life: [1], lambda life: [1])
RUNS = Target(
    lambda life: [number for number in life.runs if life.goes_on(number)],
    lambda life: life.runs,
)
RUNS_WITH_EFFECTS = Target(
    lambda life: [
        number
        for number, run in life.runs.items()
        if life.goes_on(number) and life.row(run.entry).effects
    ],
    lambda life: life.runs,
)
# Of an entry that another run of it has now.
ZOMBIES = Target(
    lambda life: [
        number
        for number, run in life.runs.items()
        if life.row(run.entry).is_leased and not life.goes_on(number)
    ],
    lambda life: life.runs,
)
# Rows as somebody read them. Late: it waits again by now, in a later version.
SIGHTINGS = Target(
    lambda life: [
        number
        for number, read in life.sightings.items()
        if life.row(read.pk.int).version == read.version
    ],
    lambda life: life.sightings,
)
LATE_SIGHTINGS = Target(
    lambda life: [
        number
        for number, read in life.sightings.items()
        if life.row(read.pk.int).status in WAITING and life.row(read.pk.int).version > read.version
    ],
    lambda life: life.sightings,
)


DELAY = st.sampled_from([0, 5])
EFFECT = st.sampled_from(["mail", "mail", "invoice"])
TERMS = st.builds(
    Terms,
    task=st.sampled_from(["one", "one", "other"]),
    key=st.sampled_from([None, "k", "k"]),
    keeps_key=st.booleans(),
    countdown=st.sampled_from([0, 0, 0, 5]),
    expires_in=st.sampled_from([None, None, 8]),
    retry_deadline=st.sampled_from([None, None, None, 12]),
    failure_limit=st.sampled_from([None, None, 2]),
    crash_limit=st.sampled_from([None, 1, 2]),
    max_crashes=st.sampled_from([None, 1]),
    on_crash=st.sampled_from(["retry", "retry", "retry", "park", "fail"]),
    owner=st.sampled_from(["", "tests"]),
    is_followed=st.booleans(),
)

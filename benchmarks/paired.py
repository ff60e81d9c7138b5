"""Paired rounds: every side is measured in each round, and only ratios within a round count.

The machine is noisy, so a rate says little and a ratio of two rates a second apart says much.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import comb
from statistics import median
from time import perf_counter
from typing import Any

CONFIDENCE = 0.95  # one-sided


class Void(Exception):
    """The work was not really done, so the figure says nothing."""


def require(done: object, expected: object, what: str) -> None:
    """Compare what was done with what should have been.

    :raises Void: they differ.
    """
    if done != expected:
        raise Void(f"{what}: {done} instead of {expected}")


class Stopwatch:
    seconds = 0.0


@contextmanager
def timed() -> Iterator[Stopwatch]:
    watch, start = Stopwatch(), perf_counter()
    yield watch
    watch.seconds = perf_counter() - start


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Ours against theirs, a figure each for every round.

    :param bar: what the ratio must reach or, where `at_most`, not exceed; None where none is set.
    """

    name: str
    against: str
    unit: str
    ours: list[float]
    theirs: list[float]
    bar: float | None = None
    at_most: bool = False

    @property
    def ratios(self) -> list[float]:
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]

    @property
    def bound(self) -> float:
        """The end of the median ratio's confidence interval that speaks against us.

        By order statistics, so that nothing is assumed of the noise. Under five rounds it is the
        worst round, with less than 95 % confidence.
        """
        worst_first = sorted(self.ratios, reverse=self.at_most)
        return worst_first[_rank(len(worst_first))]

    @property
    def is_met(self) -> bool | None:
        if self.bar is None:
            return None
        return self.bound <= self.bar if self.at_most else self.bound >= self.bar

    def as_json(self) -> dict[str, Any]:
        kept = ("name", "against", "unit", "bar", "at_most", "ours", "theirs", "ratios", "bound")
        found = {name: getattr(self, name) for name in kept}
        return {**found, "ratio": median(self.ratios), "met": self.is_met}


def _rank(rounds: int) -> int:
    """The 0-based rank whose value bounds the median (the sign test, turned round)."""
    rank, below = 0, 0.5**rounds
    while (below := below + comb(rounds, rank + 1) * 0.5**rounds) <= 1 - CONFIDENCE:
        rank += 1
    return rank


def interleaved(rounds: int, sides: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """A figure of every side for each round, in alternating order, after a round of warm-up."""
    figures: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in list(sides) if number % 2 else list(sides)[::-1]:
            figures[name].append(sides[name]())
    return {name: found[1:] for name, found in figures.items()}

"""What a stop point is: how it is played, what has to come out, and its sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from outbox.drill.facts import KILLED
from outbox.drill.stage import Stage
from outbox.drill.subject import Kind
from outbox.states import State

Wants = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Given:
    """The subject's kind of effect, its words, and its limits during the drill."""

    kind: Kind
    effect: str
    business: str
    attempts: int  # how many it has before it fails for good
    crashes: int  # at how many it is given up
    has_ledger: bool = False  # whether the task keeps its effect in the ledger

    @property
    def is_blind(self) -> bool:
        """Whether nobody can be asked about an effect, and none is dropped that comes again."""
        return self.kind == "blind"

    @property
    def is_told(self) -> bool:
        """Whether an effect that has happened, and whose end nobody recorded, is known to have."""
        return self.has_ledger or not self.is_blind


@dataclass(frozen=True, kw_only=True)
class Texts:
    """A point's sentences for one subject, and the subject's words."""

    effect: str
    business: str
    summary: str
    expected: str
    uncertain: str
    risk: str


@dataclass(frozen=True, kw_only=True)
class Point:
    """A stop point. Its texts may say {effect}, {business}, {attempts} and {crashes}."""

    name: str
    summary: str
    expected: str
    play: Callable[[Stage], None]
    #: Which of the subject's `kinds` it takes; empty: any subject will do.
    needs: str = ""
    #: What `Facts.values` must hold.
    wants: Callable[[Given], Wants]
    uncertain: str = "nothing was uncertain: the record alone decides"
    risk: str
    #: Other texts, for the subjects of which that is true.
    other: Mapping[str, str] = field(default_factory=dict)
    other_where: Callable[[Given], bool] = lambda given: not given.is_blind

    @property
    def line(self) -> str:
        """What it does, in any subject's words."""
        words = Given(kind="blind", effect="effect", business="business row", attempts=3, crashes=3)
        return texts(self, given=words).summary


def texts(point: Point, *, given: Given) -> Texts:
    """The point's sentences in the subject's words."""
    words = asdict(given)
    other = point.other if point.other_where(given) else {}
    said = {
        name: other.get(name, getattr(point, name)).format(**words)
        for name in ("summary", "expected", "uncertain", "risk")
    }
    return Texts(effect=given.effect, business=given.business, **said)


def once(**more: Any) -> Wants:
    """One job of the subject that succeeds at once, with one effect."""
    found = {
        "killed": KILLED,
        "business": 1,
        "jobs": 1,
        "state": State.SUCCEEDED,
        "attempts": 1,
        "crashes": 0,
        "failures": 0,
        "releases": 0,
        "effects": 1,
        "keys": 1,
        "stored before its end": 0,
    }
    found |= {name.replace("_", " "): value for name, value in more.items()}
    if State.FAILED not in (found["state"], *_listed(found["state"])):
        found["stored as FAILURE"] = 0
    return found


def _listed(state: Any) -> list[Any]:
    return state if isinstance(state, list) else []


def own(**more: Any) -> Wants:
    """The same for a job of the drill's own, which has no business row."""
    return once(**{"business": 0, "killed": [], **more})


def cancelled(**more: Any) -> Wants:
    """One job that stays cancelled, with its run settled, and ran at most once."""
    found = {"killed": [], "state": State.CANCELLED, "effects": 0, "keys": 0, "leases_held": 0}
    return once(**found | more)

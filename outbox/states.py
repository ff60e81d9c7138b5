"""States, verbs and edges: the life of an entry as data.

The matrix test and the state diagram in the documentation are generated from `EDGES`. Nothing
here imports Django, so that producers without it can share the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class State(StrEnum):
    """Where an obligation stands. `FINAL` states are left only by a person's requeue."""

    PENDING = "pending"  # owed; not known to be in the broker; due at `available_at`
    PUBLISHED = "published"  # the broker accepted the message; nobody has claimed it
    RUNNING = "running"  # claimed under a lease
    UNCERTAIN = "uncertain"  # an outside effect's outcome is unknown: a person decides
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINAL = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED})
OPEN = frozenset(State) - FINAL
WAITING = frozenset({State.PENDING, State.PUBLISHED})


class Verb(StrEnum):
    """What moves an entry: the name of the function, the signal, the log event and the metric."""

    ENQUEUE = "enqueue"
    PUBLISH = "publish"
    HANDOFF = "handoff"
    REJECT = "reject"
    CLAIM = "claim"
    RENEW = "renew"
    SUCCEED = "succeed"
    RETRY = "retry"
    FAIL = "fail"
    PARK = "park"
    TIMEOUT = "timeout"
    RELEASE = "release"
    DECLINE = "decline"
    CRASH = "crash"
    SETTLE = "settle"
    STRAND = "strand"
    EXPIRE = "expire"
    CANCEL = "cancel"
    RESOLVE = "resolve"
    REQUEUE = "requeue"
    RUN_NOW = "run_now"
    ERASE = "erase"


@dataclass(frozen=True)
class Edge:
    """From which states a verb leaves, and where it may arrive. None: there was no entry."""

    sources: frozenset[State | None]
    targets: frozenset[State]
    past: str  # the participle in signals, log events and metrics
    quiet: bool = False  # the plain happy path, which writes no event


def _edge(
    sources: set[State | None] | frozenset[State],
    targets: set[State] | frozenset[State],
    past: str,
    *,
    quiet: bool = False,
) -> Edge:
    return Edge(frozenset(sources), frozenset(targets), past, quiet)


_S = State

EDGES: Mapping[Verb, Edge] = MappingProxyType(
    {
        Verb.ENQUEUE: _edge({None}, {_S.PENDING}, "enqueued", quiet=True),
        Verb.PUBLISH: _edge({_S.PENDING}, {_S.PUBLISHED}, "published", quiet=True),
        Verb.HANDOFF: _edge({_S.PENDING}, {_S.SUCCEEDED}, "handed_off", quiet=True),
        Verb.REJECT: _edge({_S.PENDING}, {_S.FAILED, _S.UNCERTAIN}, "rejected"),
        # From RUNNING only with the very token: the repeat of a claim whose reply was lost.
        Verb.CLAIM: _edge(WAITING | {_S.RUNNING}, {_S.RUNNING}, "claimed", quiet=True),
        Verb.RENEW: _edge(
            {_S.RUNNING, _S.CANCELLED}, {_S.RUNNING, _S.CANCELLED}, "renewed", quiet=True
        ),
        Verb.SUCCEED: _edge({_S.RUNNING}, {_S.SUCCEEDED}, "succeeded", quiet=True),
        Verb.RETRY: _edge({_S.RUNNING}, {_S.PENDING}, "retried"),
        Verb.FAIL: _edge({_S.RUNNING}, {_S.FAILED, _S.UNCERTAIN}, "failed"),
        Verb.PARK: _edge({_S.RUNNING}, {_S.UNCERTAIN}, "parked"),
        Verb.TIMEOUT: _edge({_S.RUNNING}, {_S.PENDING, _S.FAILED, _S.UNCERTAIN}, "timed_out"),
        Verb.RELEASE: _edge({_S.RUNNING}, {_S.PENDING}, "released"),
        Verb.DECLINE: _edge({_S.PUBLISHED}, {_S.PENDING}, "declined"),
        Verb.CRASH: _edge({_S.RUNNING}, {_S.PENDING, _S.FAILED, _S.UNCERTAIN}, "crashed"),
        Verb.SETTLE: _edge({_S.CANCELLED}, {_S.CANCELLED}, "settled"),
        Verb.STRAND: _edge({_S.PUBLISHED}, {_S.PENDING}, "stranded"),
        Verb.EXPIRE: _edge(WAITING, {_S.FAILED, _S.UNCERTAIN}, "expired"),
        Verb.CANCEL: _edge(OPEN, {_S.CANCELLED}, "cancelled"),
        Verb.RESOLVE: _edge({_S.UNCERTAIN}, {_S.PENDING, _S.SUCCEEDED}, "resolved"),
        Verb.REQUEUE: _edge({_S.FAILED, _S.CANCELLED}, {_S.PENDING}, "requeued"),
        Verb.RUN_NOW: _edge({_S.PENDING}, {_S.PENDING}, "hastened"),
        Verb.ERASE: _edge(FINAL, FINAL, "erased"),
    }
)

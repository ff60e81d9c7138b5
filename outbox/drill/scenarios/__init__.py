"""The stop points as data: what each does, how it is played, what has to come out."""

from __future__ import annotations

from collections.abc import Mapping

from outbox.drill.scenarios import (
    after_effect,
    broker,
    cancellation,
    crashes,
    database,
    delivery,
    depth,
    enqueuing,
    ledger,
    limits,
    publishing,
    races,
    shutdown,
    ticks,
)
from outbox.drill.scenarios.point import Point

POINTS: tuple[Point, ...] = (
    *publishing.POINTS,
    *crashes.POINTS,
    *after_effect.POINTS,
    *ledger.POINTS,
    *limits.POINTS,
    *delivery.POINTS,
    *shutdown.POINTS,
    *cancellation.POINTS,
    *broker.POINTS,
    *database.POINTS,
    *ticks.POINTS,
    *races.POINTS,
    *depth.POINTS,
    *enqueuing.POINTS,
)
BY_NAME: Mapping[str, Point] = {point.name: point for point in POINTS}

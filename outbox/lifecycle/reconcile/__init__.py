"""reconcile: three truths side by side, and the repair of what differs.

What the database says, what the broker really holds, and what Celery's result store tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from celery import Celery
from django.db import connections

from outbox.lifecycle import lease
from outbox.lifecycle.reconcile import answered, broker, over_age, results, untold
from outbox.lifecycle.reconcile.findings import Findings, Pass
from outbox.outage import part

__all__ = ["Findings", "reconcile"]


def reconcile(
    app: Celery,
    *,
    using: str,
    dry: bool = False,
    remove: bool = False,
    renew: Callable[[], None] = lambda: None,
) -> Findings:
    """One pass. Repairs at most `REPAIRS_PER_PASS` of each kind; a dry one changes nothing.

    `remove`: also take the messages of ended entries out of the queues. `renew` is called between
    steps, so that whoever runs it can keep its lease.
    """
    this = Pass(app=app, using=using, began=_now(using), dry=dry, remove=remove, renew=renew)
    parts: Mapping[str, Callable[[], Mapping[str, Any]]] = {
        "sweep": lambda: lease.sweep(using=using, dry=dry),
        "broker": lambda: broker.compare(this),
        "results": lambda: results.compare(this),
        "answered": lambda: {"answered": answered.resolve(this)},
        "over age": lambda: {"over_age": over_age.tell(this)},
        "untold": lambda: {"untold": untold.tell(this)},
    }
    found: dict[str, Any] = {}
    failed = []
    for name, work in parts.items():
        found |= part(name, work, using=using)
        failed += [found.pop("failed")] if "failed" in found else []
        renew()
    return Findings(**found, failed="; ".join(failed))


def _now(using: str) -> Any:
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT STATEMENT_TIMESTAMP()")
        return cursor.fetchone()[0]

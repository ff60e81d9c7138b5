"""What one pass is asked to do, and what it found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from celery import Celery

from outbox import workers


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One comparison of the three truths."""

    app: Celery
    using: str
    began: datetime  # by the database's clock, before anything was looked at
    dry: bool  # say what would be done, and change nothing
    remove: bool  # take the messages of ended entries out of their lists
    renew: Callable[[], None]  # to be called between steps: extends the tick's lease

    def queue_of(self, task: str) -> str:
        """Where that task goes; if that is paused or nobody consumes it, a queue that moves."""
        routed = self.app.amqp.router.route({}, task).get("queue")
        name = str(getattr(routed, "name", routed or self.app.conf.task_default_queue))
        return workers.moving_queue(name, using=self.using)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What one pass found and repaired, by kind. Of a dry one: what it would have."""

    expired: int = 0
    crashed: int = 0
    settled: int = 0
    missing: int = 0  # seen to be missing for the first time: another look must confirm it
    stranded: int = 0  # missed by two looks, and owed again
    orphaned: int = 0  # only a worker that is gone had its message: owed again
    adopted: int = 0  # pending, with its message in its queue: marked as published
    resurrected: int = 0  # messages in the queues whose entry has ended
    removed: int = 0  # of these, taken out of their list
    alien: int = 0  # messages in the queues for a durable task, without an entry
    mismatched: int = 0  # results that said other than the entry, corrected
    answered: int = 0  # waited for a person's word, and who performed it has told: owed again
    over_age: int = 0  # newly over age: their owners are told
    untold: int = 0  # owners to be told of something, to whom no message was owed: one is now
    queued: int = 0  # messages that were looked at in the queues
    broker: str = ""  # why it could not be looked at
    skipped: str = ""  # which queues it refused to list, and why
    unlisted: str = ""  # what was done instead, where the broker cannot be listed
    results: str = ""  # why results were not compared
    failed: str = ""  # which parts of it met a mistake, and which

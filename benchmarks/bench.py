"""What every measurement works with: servers that are empty, and how large its rounds are."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import redis
from django.db import connection

from benchmarks.peer import Peer
from outbox.models import OutboxEntry


@dataclass(frozen=True, kw_only=True)
class Bench:
    folder: Path
    rounds: int
    quick: bool
    peer: Peer | None = None
    valkey: redis.Redis = field(
        default_factory=lambda: redis.Redis.from_url(os.environ["CELERY_BROKER_URL"])
    )

    def size(self, usual: int) -> int:
        return usual // 5 if self.quick else usual

    def empty(self) -> None:
        """No entries and no messages, so that every round starts from the same."""
        with connection.cursor() as cursor:
            cursor.execute("TRUNCATE celery_outbox_entry CASCADE")
        self.valkey.delete(*self.valkey.keys("bench*") or ["none"])

    def entries(self, status: str) -> int:
        return OutboxEntry.objects.filter(status=status).count()

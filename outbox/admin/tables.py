"""The small tables beside the entries: workers, maintenance ticks, paused queues."""

from __future__ import annotations

from django.contrib import admin

from outbox.admin import show
from outbox.admin.read_only import ReadOnlyAdmin
from outbox.models import OutboxQueue, OutboxTick, OutboxWorker


@admin.register(OutboxTick)
class TickAdmin(ReadOnlyAdmin):
    list_display = ["name", "last_run", "duration", "found"]
    ordering = ["name"]

    @admin.display(description="last run", empty_value="never")
    def last_run(self, tick: OutboxTick) -> str | None:
        return show.ago(tick.last_at) if tick.last_at else None

    @admin.display(description="found")
    def found(self, tick: OutboxTick) -> str:
        findings = tick.findings.items()
        return ", ".join(f"{name} {value}" for name, value in findings if value != "")


@admin.register(OutboxWorker)
class WorkerAdmin(ReadOnlyAdmin):
    list_display = ["__str__", "pid", "pool", "queue_names", "heartbeat", "stopped_at"]
    ordering = ["-started_at"]

    @admin.display(description="queues")
    def queue_names(self, worker: OutboxWorker) -> str:
        return ", ".join(map(str, worker.queues))

    @admin.display(description="heartbeat")
    def heartbeat(self, worker: OutboxWorker) -> str:
        return show.ago(worker.heartbeat_at)


@admin.register(OutboxQueue)
class QueueAdmin(ReadOnlyAdmin):
    list_display = ["name", "paused", "paused_by", "paused_at"]
    ordering = ["name"]

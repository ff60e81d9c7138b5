"""The Django app: label and table prefix `celery_outbox`."""

from __future__ import annotations

from django.apps import AppConfig


class OutboxConfig(AppConfig):
    """Registers the checks and makes `send_task` of every Celery app durable for our tasks."""

    name = "outbox"
    label = "celery_outbox"
    verbose_name = "Outbox"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from outbox import checks  # noqa: F401
        from outbox.lifecycle import enqueue
        from outbox.worker import clerk, connections

        clerk.employ()
        connections.keep()
        enqueue.take_over_send_task()

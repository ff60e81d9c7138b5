"""The Django app that the drilled processes have on top of the project's own."""

from __future__ import annotations

from django.apps import AppConfig


class DrillConfig(AppConfig):
    """Brings the drill's own tasks into each drilled process, and the witness's ears."""

    name = "outbox.drill"
    label = "celery_outbox_drill"

    def ready(self) -> None:
        from outbox.drill import tasks, unknowing, witness  # noqa: F401

        witness.listen()
        unknowing.listen()

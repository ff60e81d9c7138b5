"""The Django app that the drilled processes have on top of the project's own."""

from __future__ import annotations

from django.apps import AppConfig


class DrillConfig(AppConfig):
    """Lets the witness hear what happens in each drilled process."""

    name = "outbox.drill"
    label = "celery_outbox_drill"

    def ready(self) -> None:
        from outbox.drill import witness

        witness.listen()

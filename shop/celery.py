"""The shop's Celery application: `celery -A shop worker`, `celery -A shop beat`."""

import os
from typing import Any

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")

app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


@app.on_after_finalize.connect
def schedule_ticks(sender: Celery, **kwargs: Any) -> None:
    """Let celery-beat run the outbox's ticks."""
    # Imported here: while this module loads, Django's models cannot be imported yet.
    from outbox.tasks import beat_schedule

    sender.conf.beat_schedule = {**sender.conf.beat_schedule, **beat_schedule()}

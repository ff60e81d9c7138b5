"""A whole app of durable tasks, by one argument: `Celery(…, task_cls=…)`."""

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")

app = Celery("whole", task_cls="outbox.tasks:OutboxTask", set_as_current=False)
app.config_from_object("django.conf:settings", namespace="CELERY")


@app.task(name="whole.double", shared=False)
def double(number: int) -> int:
    return 2 * number

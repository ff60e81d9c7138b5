"""The Celery app of the worker processes that the tests start: `celery -A tests.worker worker`."""

import os
from typing import Any

from celery import Celery
from celery.signals import worker_init

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")

app = Celery("tests")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


@worker_init.connect
def forget(**_: Any) -> None:
    """As a worker of an older release, which does not know these tasks yet."""
    for name in os.environ.get("TESTS_UNKNOWN", "").split():
        del app.tasks[name]

"""Runs in django-celery-outbox's environment: a line "enqueue 1000" in, a line of JSON out.

Its log lines and its metrics are turned off, and its batches are as large as ours: what is
measured is the work that nobody can turn off.
"""

import json
import logging
import os
import sys
import time

import dj_database_url
import django
import structlog
from django.conf import settings

settings.configure(
    DATABASES={"default": dj_database_url.config(conn_max_age=600)},
    INSTALLED_APPS=["django_celery_outbox"],
    USE_TZ=True,
    MONITORING_METRICS_ENABLED=False,
    CELERY_OUTBOX_APP="__main__.app",
)
django.setup()
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))

from django.core.management import call_command  # noqa: E402  # once Django is set up
from django.db import transaction  # noqa: E402
from django_celery_outbox import CeleryOutbox, OutboxCelery, Relay  # noqa: E402
from django_celery_outbox.relay import RelayConfig  # noqa: E402

app = OutboxCelery("peer", broker=os.environ["CELERY_BROKER_URL"])
app.conf.task_default_queue = "bench"


@app.task(name="bench.noop", ignore_result=True)
def noop(order: int) -> None:
    """Never runs: only its messages are counted."""


def enqueue(count: int) -> int:
    with transaction.atomic():
        for order in range(count):
            noop.delay(order)
    return CeleryOutbox.objects.count()


def relay(count: int) -> int:
    before = CeleryOutbox.objects.count()
    while CeleryOutbox.objects.exists():
        # One batch. Its start() does this in a loop, and sleeps where nothing is due.
        publisher._processing()
    return before


answers, sys.stdout = sys.stdout, sys.stderr  # where structlog writes
call_command("migrate", verbosity=0)
CeleryOutbox.objects.all().delete()  # what a run before this one left
publisher = Relay(app, RelayConfig.init(batch_size=500, idle_time=0))
for line in sys.stdin:
    verb, count = line.split()
    start = time.perf_counter()
    done = {"enqueue": enqueue, "relay": relay}[verb](int(count))
    print(
        json.dumps({"done": done, "seconds": time.perf_counter() - start}), file=answers, flush=True
    )

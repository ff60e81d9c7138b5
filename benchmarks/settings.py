"""The shop's settings, with the benchmarks' own tasks and no log line for each job."""

import os
from ast import literal_eval

from shop.settings import *  # noqa: F403
from shop.settings import INSTALLED_APPS, LOGGING, OUTBOX

INSTALLED_APPS = [*INSTALLED_APPS, "benchmarks"]
LOGGING = {**LOGGING, "root": {"handlers": ["stderr"], "level": "WARNING"}}
# What the measurement of reconcile leaves waiting is not old.
OUTBOX = {**OUTBOX, "OVER_AGE": 86_400, **literal_eval(os.environ.get("BENCH_TIMES", "{}"))}

"""The shop's settings, with the tests' own tasks and short times."""

import os
from typing import Any

from shop.settings import *  # noqa: F403
from shop.settings import DATABASES, INSTALLED_APPS

# A second database, on the same server, with an outbox of its own.
DATABASES = {**DATABASES, "other": {**DATABASES["default"]}}
DATABASES["other"]["NAME"] += "_other"
# As behind PgBouncer in transaction mode, for the workers of one test.
DATABASES["default"]["DISABLE_SERVER_SIDE_CURSORS"] = "TESTS_POOLED" in os.environ

if "gone" in os.environ.get("TESTS_DATABASES", ""):  # for the workers of one test
    DATABASES["gone"] = {**DATABASES["default"], "NAME": "nowhere"}

INSTALLED_APPS = [*INSTALLED_APPS, "tests"]

OUTBOX: dict[str, Any] = {  # type: ignore[no-redef]
    "DATABASES": os.environ.get("TESTS_DATABASES", "default").split(","),
    "LEASE": float(os.environ.get("TESTS_LEASE", "2")),
    "DISPATCH_EVERY": 0.2,
    "RECONCILE_EVERY": 1,
    "STRAND_GRACE": 1,
    "CRASH_BACKOFF": 1,
    "BREAKER": 0.1,
    "OWNERS": {"tests": ["owner@tests.example"]},
    "DEFAULT_OWNER": "",
    **({"LEESE": 3} if "TESTS_TYPO" in os.environ else {}),  # for a test of what is refused
}

CELERY_WORKER_SOFT_SHUTDOWN_TIMEOUT = float(os.environ.get("TESTS_SOFT_SHUTDOWN", "0"))

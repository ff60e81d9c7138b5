"""Settings of the drilled processes: the project's own, turned away from every real server."""

from __future__ import annotations

import json
import os
from importlib import import_module
from typing import Any

from outbox.drill import environment
from outbox.drill.subject import OWNER_ADDRESS

_project = import_module(os.environ[environment.PROJECT])
_found: dict[str, Any] = {name: getattr(_project, name) for name in dir(_project) if name.isupper()}
_outbox: dict[str, Any] = _found.get("OUTBOX", {})
_database = environment.database_settings(os.environ[environment.DATABASE])
_broker = os.environ["CELERY_BROKER_URL"]
_owner = _outbox.get("DEFAULT_OWNER") or "drill"

_found |= {
    "INSTALLED_APPS": [*_found["INSTALLED_APPS"], "outbox.drill"],
    "DATABASES": dict.fromkeys(_found.get("DATABASES", ["default"]), _database),
    "DATABASE_ROUTERS": [],
    "CACHES": {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}},
    "CELERY_BROKER_URL": _broker,
    "CELERY_TASK_ALWAYS_EAGER": False,
    "EMAIL_BACKEND": "django.core.mail.backends.filebased.EmailBackend",
    "EMAIL_FILE_PATH": os.path.join(os.environ[environment.FOLDER], "mails"),  # noqa: PTH118
    "ALLOWED_HOSTS": ["127.0.0.1"],
    "SECURE_SSL_REDIRECT": False,
    "SESSION_COOKIE_SECURE": False,
    "CSRF_COOKIE_SECURE": False,
    "LOGGING": {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": "%(asctime)s %(levelname)-7s %(name)s: %(message)s"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "plain"}},
        "root": {"handlers": ["stderr"], "level": "INFO"},
    },
    "OUTBOX": {
        **_outbox,
        **environment.TIMES,
        "OWNERS": {name: [OWNER_ADDRESS] for name in [*_outbox.get("OWNERS", {}), _owner]},
        "DEFAULT_OWNER": _owner,
        "PAUSED": False,
        "LISTEN_DSN": "",
        "HEARTBEAT_FILE": "",
    },
}
if not str(_found.get("CELERY_RESULT_BACKEND") or "django-db").startswith("django"):
    _found["CELERY_RESULT_BACKEND"] = _broker

for _name, _value in json.loads(os.environ[environment.OVERRIDES]).items():
    _mine = _found.get(_name)
    _both = isinstance(_mine, dict) and isinstance(_value, dict)
    _found[_name] = {**_mine, **_value} if _both else _value  # type: ignore[dict-item]

globals().update(_found)

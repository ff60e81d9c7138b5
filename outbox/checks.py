"""System checks: settings that cannot work are refused by `manage.py check`, with a way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, register
from django.db import connections

from outbox.conf import settings
from outbox.errors import ConfigurationError


@register("celery_outbox")
def check_settings(app_configs: Sequence[Any] | None, **_: Any) -> list[CheckMessage]:
    try:
        settings()
    except ConfigurationError as error:
        return [Error(str(error), hint="See docs/reference/settings.md.", id="celery_outbox.E001")]
    return []


@register("celery_outbox")
def check_databases(app_configs: Sequence[Any] | None, **_: Any) -> list[CheckMessage]:
    found: list[CheckMessage] = []
    try:
        aliases = settings().DATABASES
    except ConfigurationError:
        return found
    for alias in aliases:
        if alias not in connections:
            found.append(_error(f"OUTBOX['DATABASES'] names {alias!r}: DATABASES has none.", 2))
        elif connections[alias].vendor != "postgresql":
            found.append(_error(f"The database {alias!r} is not PostgreSQL 14 or later.", 3))
        elif connections[alias].settings_dict.get("OPTIONS", {}).get("isolation_level"):
            found.append(_error(f"The database {alias!r} is not at READ COMMITTED.", 4))
    return found


def _error(message: str, number: int) -> Error:
    return Error(message, hint="See docs/reference/checks.md.", id=f"celery_outbox.E{number:03}")

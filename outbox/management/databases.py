"""What the commands need of the databases: the aliases meant, and that they can be used."""

from __future__ import annotations

from collections.abc import Collection

from django.core.management.base import CommandError
from django.db import DatabaseError, InterfaceError, NotSupportedError, connections

from outbox.conf import settings
from outbox.errors import ConfigurationError
from outbox.models import OutboxEntry


def aliases_of(database: str | None) -> Collection[str]:
    """The given alias, or those of the settings.

    Raises:
        CommandError: no such alias, or settings that cannot work.
    """
    try:
        aliases = [database] if database else settings().DATABASES
    except ConfigurationError as error:
        raise CommandError(str(error)) from error
    for alias in aliases:
        if alias not in connections:
            raise CommandError(f"DATABASES has no {alias!r}; it has {', '.join(connections)}.")
    return aliases


def reachable(aliases: Collection[str]) -> None:
    """Make sure that each database answers, is new enough and has the tables.

    Raises:
        CommandError: it does not; in one sentence.
    """
    for alias in aliases:
        connection = connections[alias]
        try:
            connection.ensure_connection()
            tables = connection.introspection.table_names()
        except NotSupportedError as error:
            raise CommandError(f"The database {alias!r} is too old: {error}.") from error
        except (DatabaseError, InterfaceError) as error:
            reason = " ".join(str(error).split())
            raise CommandError(f"The database {alias!r} cannot be reached: {reason}") from error
        if OutboxEntry._meta.db_table not in tables:
            raise CommandError(f"The database {alias!r} has no outbox yet: run manage.py migrate.")

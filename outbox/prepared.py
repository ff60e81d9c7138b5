"""A cursor whose statements the server parses and plans once for each connection.

Django binds values into the text, so that PostgreSQL plans every job's statements anew, which
costs it more than running them. Where Django is told that a session cannot keep anything
(`DISABLE_SERVER_SIDE_CURSORS`, as behind PgBouncer in transaction mode), it is Django's cursor.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import psycopg
from django.db import connections


def cursor(using: str) -> AbstractContextManager[Any]:
    """For a `with` block, like `connection.cursor()`; what it runs is logged and counted alike."""
    connection = connections[using]
    if connection.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS"):
        return connection.cursor()
    connection.close_if_health_check_failed()
    connection.ensure_connection()
    native = connection.connection
    native.prepare_threshold = 0  # not for Django's own cursors: they never prepare
    bound: Any = psycopg.Cursor(native)
    if connection.queries_logged:
        return connection.make_debug_cursor(bound)
    return connection.make_cursor(bound)

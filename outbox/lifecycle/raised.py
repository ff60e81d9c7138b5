"""raised: what a run raised, as an errback will get it."""

from __future__ import annotations

from celery.utils.serialization import ensure_serializable

from outbox import payload
from outbox.conf import settings


def as_stored(error: BaseException) -> str:
    """An exception as JSON text in Celery's words, for errbacks; empty where it cannot be kept.

    Recording an end must never fail because of what it says.
    """
    if not isinstance(error, Exception):  # an errback gets no SystemExit
        return ""
    try:
        kind = type(error)
        said = ensure_serializable(error.args, payload.dumps)
        names = {"exc_type": kind.__qualname__, "exc_module": kind.__module__}
        text = payload.dumps({**names, "exc_message": said})
    except Exception:  # whatever its own methods raise
        return ""
    return text if len(text.encode()) <= settings().MAX_PAYLOAD_BYTES else ""

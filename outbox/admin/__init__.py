"""What people look at, and what they may do: entries can be retried and cancelled, nothing else.

Whatever changes an entry goes through `outbox.lifecycle` with the person's name.
"""

from outbox.admin import entries, tables

__all__ = ["entries", "tables"]

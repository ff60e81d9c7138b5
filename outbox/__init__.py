"""Background work that survives restarts: a transactional outbox for Celery and Django.

`cancel`, `cancel_many`, `requeue`, `resolve`, `settle_effect`, `run_now` and `erase` are here for
code; tasks derive from `outbox.tasks.OutboxTask`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.lifecycle.cancel import cancel, cancel_many
    from outbox.lifecycle.operate import erase, requeue, resolve, run_now, settle_effect

__all__ = ["cancel", "cancel_many", "erase", "requeue", "resolve", "run_now", "settle_effect"]

_CANCEL = dict.fromkeys(("cancel", "cancel_many"), "outbox.lifecycle.cancel")
_HOMES = dict.fromkeys(__all__, "outbox.lifecycle.operate") | _CANCEL


def __getattr__(name: str) -> Any:
    # Django imports this package before its models can be: look the functions up when used.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

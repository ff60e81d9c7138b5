"""Effects outside the database: what a task or a command may do once, and never blindly again.

In a task it is `self.effect(…)`. `effect(…)` here is the same for a management command or a script,
which brings a key of its own.
"""

from __future__ import annotations

from typing import Any

from outbox.errors import NotPerformed
from outbox.lifecycle import effect as ledger
from outbox.lifecycle.effect import NOT_FOUND, Found, NotFound, Perform, Verify

__all__ = ["NOT_FOUND", "Found", "NotFound", "NotPerformed", "Perform", "Verify", "effect"]


def effect(
    key: str,
    perform: Perform,
    *,
    request: Any = None,
    verify: Verify | None = None,
    on_uncertain: str = "park",
    timeout: float | None = None,
    repeat_within: float | None = None,
    using: str = "",
) -> Any:
    """Do something outside the database under `key`, which names it for ever; its result.

    The other arguments are those of `OutboxTask.effect`. Of an uncertain one a person says what
    became of it: `outbox.settle_effect(key, happened=…, actor=…)`.

    Raises:
        EffectUncertain: nobody knows whether it happened.
        EffectUnderWay: somebody else may be at it.
        EffectUnverified: `verify` could not say.
        EffectMismatch: it was begun with another request.
        NotPerformed: `perform` says so.
        MisuseError: inside a transaction.
        PayloadError: the request cannot be stored.
    """
    ledger.check_own(key)
    this = ledger.begin_of(key, name=key, request=request, timeout=timeout, using=using)
    policy = ledger.policy_of(verify, on_uncertain, repeat_within)
    return ledger.carry_out(this, perform, policy)

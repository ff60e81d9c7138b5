"""effect: something outside the database, which is never repeated blindly.

It is begun durably before the call, and its result recorded after it. Whoever finds it begun and
without an outcome asks (`verify`), repeats it under the same key, or leaves it to a person.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from celery.exceptions import Retry
from django.db import connections

from outbox import payload, transitions
from outbox.clock import as_uuid
from outbox.conf import default_database, settings
from outbox.errors import (
    Cancelled,
    EffectMismatch,
    EffectUncertain,
    EffectUnderWay,
    EffectUnverified,
    MisuseError,
    NotPerformed,
    PayloadError,
)
from outbox.failpoints import Failpoint, reach
from outbox.lifecycle.cancel import raise_if_cancelled
from outbox.lifecycle.claim import Claim
from outbox.lifecycle.finish import usual_pause
from outbox.lifecycle.run import Run
from outbox.outage import until_answered
from outbox.transitions import Begin, Standing

if TYPE_CHECKING:
    from outbox.tasks import OutboxTask

logger = logging.getLogger("outbox")

DAY = timedelta(days=1)
LONGEST = 86_400.0 * 365  # seconds
LONGEST_NAME = 200  # characters
CHOICES = ("park", "repeat")

T = TypeVar("T")
Perform = Callable[[str], Any]


@dataclass(frozen=True)
class Found:
    """What `verify` answers where the effect has happened, with its result."""

    result: Any = None


class NotFound:
    """What `verify` answers where it has not: `NOT_FOUND`."""


NOT_FOUND = NotFound()

Verify = Callable[[str], Found | NotFound]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What to do where the outcome is unknown."""

    verify: Verify | None
    on_uncertain: str
    repeat_within: timedelta

    @property
    def asks_a_person(self) -> bool:
        return self.verify is None and self.on_uncertain == "park"


class Lost(Exception):
    """The run no longer owns its entry: nothing is begun."""


def carry_out(this: Begin, perform: Perform, policy: Policy) -> Any:
    """The effect's result: recorded by an earlier attempt, found by asking, or performed now.

    Raises:
        Lost: the run no longer owns its entry.
        EffectMismatch: it was begun with another request.
        EffectUncertain: a person has to say whether it happened.
        EffectUnverified: `verify` raised.
        EffectUnderWay: its first performer may still be at it.
        NotPerformed: `perform` says so.
    """
    _check_transaction(this)
    effect = _durably(this, partial(transitions.begin_effect, this))
    if effect is None:
        raise Lost
    if effect.begin_token == this.token:
        return _perform(this, perform, policy)
    if effect.request != this.request:
        raise EffectMismatch(
            f"The effect {this.name!r} was begun with another request. An effect that differs "
            "needs a name of its own."
        )
    if effect.done_at:
        return effect.result
    if effect.cleared_at:
        return _perform_again(this, effect, perform, policy)
    return _find_out(this, effect, perform, policy)


def _find_out(this: Begin, effect: Standing, perform: Perform, policy: Policy) -> Any:
    """It was begun, and nobody has said what became of it."""
    if this.entry_id is None and effect.is_under_way and policy.verify is None:
        # No claim keeps two commands apart.
        raise EffectUnderWay(this.key, until=effect.performer_until)
    if policy.verify is not None:
        again = partial(_perform_again, this, effect, perform, policy)
        return _verified(this, effect, policy.verify, again)
    if policy.on_uncertain == "repeat" and effect.age < policy.repeat_within:
        return _perform_again(this, effect, perform, policy)
    raise EffectUncertain(_why_a_person(this, policy), key=this.key)


def _verified(this: Begin, effect: Standing, verify: Verify, again: Callable[[], Any]) -> Any:
    try:
        answer = verify(this.key)
    except Exception as error:
        raise EffectUnverified(f"{this.name}: {type(error).__name__}: {error}") from error
    if isinstance(answer, Found):
        result = _storable(this, answer.result)
        _settle(this, transitions.effect_done, token=effect.begin_token, result=result, by="verify")
        return result
    if answer is not NOT_FOUND:
        raise MisuseError(
            f"{this.name}: verify returned {answer!r:.80}; it returns Found(result) or NOT_FOUND, "
            "and raises where it cannot say."
        )
    if effect.is_under_way:
        raise EffectUnderWay(this.key, until=effect.performer_until)
    return again()


def _perform_again(this: Begin, effect: Standing, perform: Perform, policy: Policy) -> Any:
    begun = _durably(this, partial(transitions.begin_effect_again, this, before=effect.begin_token))
    if begun is None:
        raise Lost
    return _perform(this, perform, policy)


def _perform(this: Begin, perform: Perform, policy: Policy) -> Any:
    reach(Failpoint.BEGUN)
    try:
        result = perform(this.key)
    except NotPerformed:
        _settle(this, transitions.effect_cleared, token=this.token, by="performer")
        raise
    except Exception as error:
        if not policy.asks_a_person:
            raise
        why = f"{type(error).__name__}: {error}"
        raise EffectUncertain(f"{this.name} may have happened: {why}", key=this.key) from error
    reach(Failpoint.PERFORMED)
    result = _storable(this, result)
    if not _settle(this, transitions.effect_done, token=this.token, result=result, by="performer"):
        logger.warning("outbox.effect.overtaken key=%s: another run has begun it anew", this.key)
    return result


def _settle(this: Begin, move: Callable[..., bool], **how: Any) -> bool:
    return _durably(this, partial(move, this.key, using=this.using, **how))


def _durably(this: Begin, work: Callable[[], T]) -> T:
    return until_answered(work, using=this.using, what="keeping the ledger")


def _check_transaction(this: Begin) -> None:
    if connections[this.using].in_atomic_block:
        raise MisuseError(
            f"The effect {this.name!r} must be begun by a commit of its own, before the call: "
            "leave transaction.atomic() first, and use no effect() in a task with atomic=True."
        )


def _storable(this: Begin, result: Any) -> Any:
    """As later attempts will get it. It has happened: to record that never fails by its words."""
    try:
        text = payload.dumps(result)
    except PayloadError as error:
        logger.warning("outbox.effect.result_dropped key=%s: it %s", this.key, error)
        return None
    if len(text.encode()) > settings().MAX_PAYLOAD_BYTES:
        logger.warning("outbox.effect.result_dropped key=%s: it is too large", this.key)
        return None
    return payload.loads(text)


def _why_a_person(this: Begin, policy: Policy) -> str:
    if policy.on_uncertain == "repeat":
        return f"{this.name} was begun too long ago to be repeated under its key"
    return f"{this.name} was begun, and nobody can be asked whether it happened"


def in_task(task: OutboxTask, run: Run, this: Begin, perform: Perform, policy: Policy) -> Any:
    """`carry_out` in a body, whose run then ends as the ledger demands."""
    if this.request is None and this.key in run.effects:
        raise MisuseError(
            f"The effect {this.name!r} was done before in this run, and would not be done again: "
            "give each its own name, or say what is asked for by request=."
        )
    run.effects.add(this.key)
    try:
        result = carry_out(this, perform, policy)
    except NotPerformed as error:
        raise (error.__cause__ or error) from None
    except Lost:
        raise_if_cancelled(run.claim)
        raise Cancelled("its run is over") from None
    except EffectUnverified as error:
        run.unsettled.add(this.key)
        raise Retry(exc=error.__cause__, when=usual_pause(task, run.claim.retries)) from error
    except BaseException:
        run.unsettled.add(this.key)
        raise
    run.unsettled.discard(this.key)
    return result


def begin_of(
    key: str,
    *,
    name: str,
    request: Any,
    timeout: float | None,
    claim: Claim | None = None,
    using: str = "",
) -> Begin:
    """A beginning, of a claim's run or of nobody's.

    Raises:
        PayloadError: the request cannot be stored.
        MisuseError: the timeout is no positive number of seconds.
    """
    _check_name(name)
    seconds = settings().LEASE if timeout is None else timeout
    _check_seconds("timeout", seconds)
    return Begin(
        key=key,
        name=name,
        token=uuid4(),
        request=payload.loads(payload.dumps(request)),
        timeout=timedelta(seconds=seconds),
        entry_id=claim.id if claim else None,
        claim_token=claim.token if claim else None,
        attempt=claim.attempts if claim else 0,
        using=claim.using if claim else using or default_database(),
    )


def policy_of(verify: Verify | None, on_uncertain: str, repeat_within: float | None) -> Policy:
    """What to do where nobody knows.

    Raises:
        MisuseError: an answer that is not one of the choices.
    """
    if on_uncertain not in CHOICES:
        choices = " or ".join(map(repr, CHOICES))
        raise MisuseError(f"on_uncertain={on_uncertain!r}: it takes {choices}.")
    if verify is not None and not callable(verify):
        raise MisuseError(f"verify={verify!r:.80} must be a function of the key, or None.")
    if repeat_within is not None:
        _check_seconds("repeat_within", repeat_within)
    within = DAY if repeat_within is None else timedelta(seconds=repeat_within)
    return Policy(verify=verify, on_uncertain=on_uncertain, repeat_within=within)


def _check_name(name: Any) -> None:
    """It names the effect for ever, in an index, and reaches the receiving side in a header."""
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise MisuseError(
            f"An effect cannot be named {name!r:.80}: it takes a text of 1 to {LONGEST_NAME} "
            "printable characters."
        )


def check_own(key: str) -> None:
    """A key of nobody's run: an entry's is its ID, a colon and the name.

    Raises:
        MisuseError: it would be taken for an entry's.
    """
    head, colon, _ = key.partition(":") if isinstance(key, str) else ("", "", "")
    if colon and as_uuid(head) is not None:
        raise MisuseError(f"The key {key!r:.80} is one of an entry's: choose a key of your own.")


def _check_seconds(option: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < LONGEST:
        raise MisuseError(f"{option}={value!r:.80} must be a positive number of seconds.")

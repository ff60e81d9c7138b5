"""What a user derives from, the extension's own tasks, and their beat schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, ClassVar
from uuid import UUID, uuid4

from asgiref.sync import sync_to_async
from celery import Celery, shared_task
from celery.contrib.django.task import DjangoTask
from celery.result import AsyncResult
from django.db import InterfaceError, OperationalError

from outbox.conf import RANGE, in_range, settings
from outbox.errors import ConfigurationError, MisuseError, NotFollowed
from outbox.lifecycle import cancel, follow, run
from outbox.lifecycle import effect as ledger
from outbox.lifecycle.effect import Perform, Verify
from outbox.lifecycle.finish import Again, when_to_run
from outbox.transitions import FOLLOW, TELL_OWNER, Kind
from outbox.worker import tracer

_AWAY = (OperationalError, InterfaceError)  # the database, in the middle of a body
_CHOICES = {
    "on_crash": ("retry", "park", "fail"),
    "payload": ("database", "message"),
    "unknown_delivery": ("drop", "adopt"),
    "consumer": ("celery", "external"),
}
_NUMBERS: Mapping[str, Any] = {
    "max_crashes": int,
    "retry_deadline": int | float,
    "retention": int | float,
    "over_age": int | float,
}


class OutboxTask(DjangoTask):
    """A Celery task that is an obligation: its entry commits with the transaction that owes it.

    `delay`, `apply_async`, signatures and canvas, and the app's `send_task` write the row in the
    caller's transaction. `apply_async` takes `subject`, `unique_key`, `owner` and `using` beside
    Celery's options. Eager and direct calls run plainly, without a row.
    """

    abstract = True

    #: The body and its completion share one transaction, so that it happens exactly once.
    atomic: ClassVar[bool] = False
    #: Who is told when an entry fails for good or waits for a person: a name in `OWNERS`.
    owner: ClassVar[str | None] = None
    #: How many crashes (dead processes) end an entry; None for the setting `MAX_CRASHES` (3).
    max_crashes: ClassVar[int | None] = None
    #: After a crash: "retry", "park" for a person, or "fail".
    on_crash: ClassVar[str] = "retry"
    #: No attempt starts later than this many seconds after the first was due.
    retry_deadline: ClassVar[float | None] = None
    #: Seconds that an ended entry is kept, instead of the setting `RETENTION`.
    retention: ClassVar[float | None] = None
    #: "message" puts the arguments into the message too, for Flower and for a rollout.
    payload: ClassVar[str] = "database"
    #: "adopt" turns a delivery without an entry into one, while a team is rolling out.
    unknown_delivery: ClassVar[str] = "drop"
    #: "external": another code base runs it; the broker's acceptance is its success.
    consumer: ClassVar[str] = "celery"
    #: Open for longer than this many seconds, it is over age; None for the setting `OVER_AGE`.
    over_age: ClassVar[float | None] = None
    #: False: a plain Celery task in spite of its class.
    durable: ClassVar[bool] = True
    #: Names of arguments whose values make the unique key.
    unique_by: ClassVar[tuple[str, ...]] = ()

    Request = "outbox.worker.request:OutboxRequest"

    acks_late = True
    acks_on_failure_or_timeout = True
    reject_on_worker_lost = False
    track_started = False

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Refuse, when the task is registered, what could not work.

        Raises:
            ConfigurationError: an option outside its choices, or that is no usable number; a
                `__call__` that does not call `super()`; `worker_deduplicate_successful_tasks`.
        """
        super().on_bound(app)
        for option, choices in _CHOICES.items():
            if getattr(cls, option) not in choices:
                raise ConfigurationError(
                    f"{cls.name}: {option} cannot be {getattr(cls, option)!r}; it takes "
                    f"{' or '.join(map(repr, choices))}."
                )
        _check_numbers(cls)
        _check_call(cls)
        if app.conf.worker_deduplicate_successful_tasks:
            raise ConfigurationError(
                f"{cls.name}: worker_deduplicate_successful_tasks skips bodies after the claim. "
                "Turn it off: the outbox discards duplicates itself."
            )

    @property
    def is_durable(self) -> bool:
        """Whether its calls are entries. Celery's own tasks never are."""
        return self.durable and not (self.name or "").startswith("celery.")

    def row_options(self) -> dict[str, Any]:
        """What a recoverer or dispatcher must know of the task without having its code."""
        found = {
            "payload": self.payload if self.payload != "database" else None,
            "consumer": self.consumer if self.consumer != "celery" else None,
            "on_crash": self.on_crash if self.on_crash != "retry" else None,
            "max_crashes": self.max_crashes,
            "retention": self.retention,
            "over_age": self.over_age,
        }
        return {name: value for name, value in found.items() if value is not None}

    @property
    def __trace__(self) -> Callable[..., Any] | None:
        """Celery's tracer, inside the claim: workers assign it, and get it back wrapped."""
        return self.__dict__.get("_outbox_tracer")

    @__trace__.setter
    def __trace__(self, built: Callable[..., Any] | None) -> None:
        self.__dict__["_outbox_tracer"] = built and tracer.wrap(self, built)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = run.current(self)
        if current is None or current.entered:
            return super().__call__(*args, **kwargs)
        return run.perform(self, current, args, kwargs)

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> AsyncResult:
        """Owe a call of this task. Celery's options, and:

        Args:
            subject: what it is about, such as `shop.order:42`; it can be searched and erased by.
            unique_key: at most one entry of this task with this key is waiting; a second call
                returns the first one's result, with `created` False.
            owner: who is told of its failure, instead of the task's.
            using: the alias of the database whose transaction owes it.

        Raises:
            PayloadError: the arguments, the ID or an option cannot be stored.
            UnknownQueueError: no such queue, and Celery may not create it.
            MisuseError: an option that is unknown, or an ID that is another entry's.
        """
        current = run.current(self)
        if current is not None and current.retrying:
            return self._note_retry(current, args, kwargs, options)
        return super().apply_async(args, kwargs, **options)

    async def aapply_async(
        self, args: Any = None, kwargs: Any = None, **options: Any
    ) -> AsyncResult:
        """`apply_async` for async views, on Django's own database thread."""
        return await sync_to_async(self.apply_async)(args, kwargs, **options)

    def retry(
        self, args: Any = None, kwargs: Any = None, exc: Any = None, throw: bool = True, **more: Any
    ) -> Any:
        """Celery's `retry`. It only raises: the row is written after the body has left.

        Raises:
            MisuseError: `throw=False`, since the body would go on while its entry is due again.
        """
        current = run.current(self)
        if current is None:
            return super().retry(args, kwargs, exc, throw, **more)
        if not throw:
            raise MisuseError(f"{self.name}: retry(throw=False) cannot be kept; raise it instead.")
        current.retrying = True
        try:
            return super().retry(args, kwargs, exc, throw, **more)
        finally:
            current.retrying = False

    def raise_if_cancelled(self) -> None:
        """Leave the body where going on is useless: its end would be discarded.

        Called eagerly or plainly, outside a claim, it does nothing.

        Raises:
            Cancelled: the entry was cancelled, or its lease ran out and another run owns it.
        """
        current = run.current(self)
        if current is not None:
            cancel.raise_if_cancelled(current.claim)

    def effect(
        self,
        name: str,
        perform: Perform,
        *,
        request: Any = None,
        verify: Verify | None = None,
        on_uncertain: str = "park",
        timeout: float | None = None,
        repeat_within: float | None = None,
    ) -> Any:
        """Do something outside the database that is not repeated blindly; its result.

        It is begun in the ledger by a commit of its own, performed, and its result recorded. Later
        attempts of this entry get the recorded result, and perform nothing. Where an attempt died
        in between, nobody knows: then `verify` is asked, or `on_uncertain` says what to do.

        Called eagerly or plainly, outside a claim, it performs and keeps no ledger.

        Args:
            name: names the effect within its entry; one body may have several.
            perform: does it, under the idempotency key that it is given: `<entry id>:<name>`, the
                same for all attempts. What it returns must be JSON. It raises `NotPerformed` where
                it has certainly not happened.
            request: what is asked for, as JSON; the same name with another request is an error.
            verify: asks the receiving side, by the key: returns `Found(result)` or `NOT_FOUND`,
                and raises where it cannot say, which is a failure that is tried again.
            on_uncertain: "park": a person is asked. "repeat": it is performed under the same key.
            timeout: seconds that `perform` may take; before they are over, `NOT_FOUND` may only
                mean that it is still under way. None: the lease.
            repeat_within: seconds after the first begin in which a repetition is known by its key;
                a person is asked afterwards. None: 24 hours.

        Raises:
            EffectUncertain, EffectUnderWay: let them leave: the entry is parked, or tried later.
            EffectMismatch: it was begun with another request.
            Cancelled: the entry was cancelled, or its lease ran out and another run owns it.
            MisuseError: inside a transaction, and so with `atomic=True`: that could be undone; the
                same name twice in a run without a request; a name or number that cannot be used.
            PayloadError: the request cannot be stored.
        """
        current = run.current(self)
        if current is None:
            return perform(f"{self.request.id or uuid4()}:{name}")
        claim = current.claim
        this = ledger.begin_of(
            f"{claim.id}:{name}", name=name, request=request, timeout=timeout, claim=claim
        )
        policy = ledger.policy_of(verify, on_uncertain, repeat_within)
        return ledger.in_task(self, current, this, perform, policy)

    def _note_retry(
        self, current: run.Run, args: Any, kwargs: Any, options: dict[str, Any]
    ) -> AsyncResult:
        """Where `Task.retry` would publish a copy: keep what it asks for, for the ending."""
        claim, changes = current.claim, {}
        if list(args or ()) != claim.args or dict(kwargs or {}) != claim.kwargs:
            changes = {"args": list(args or ()), "kwargs": dict(kwargs or {})}
        if options.get("queue") not in (None, claim.queue):
            changes["queue"] = str(options["queue"])
        when = options.get("eta") or options.get("countdown") or 0
        current.again = Again(when_to_run(when, self), changes, checked=True)
        return self.AsyncResult(str(claim.id))


def _check_numbers(cls: type[OutboxTask]) -> None:
    for option, kind in _NUMBERS.items():
        value = getattr(cls, option)
        if value is not None and not in_range(value, kind):
            number = "a whole number" if kind is int else "a number of seconds,"
            raise ConfigurationError(
                f"{cls.name}: {option} cannot be {value!r}; it takes {number} {RANGE}."
            )


def _check_call(cls: type[OutboxTask]) -> None:
    for klass in cls.__mro__[: cls.__mro__.index(OutboxTask)]:
        call = klass.__dict__.get("__call__")
        code = getattr(call, "__code__", None)
        if code is not None and not {"super", "__call__"} & {*code.co_names, *code.co_freevars}:
            raise ConfigurationError(
                f"{cls.name}: its __call__ does not call super().__call__(), so no run would be "
                "recorded."
            )


class _Tick(OutboxTask):
    """A tick is not an obligation: the next one does what this one did not."""

    abstract = True
    durable = False
    ignore_result = True
    acks_late = False


@shared_task(base=_Tick, bind=True, name="outbox.dispatch")
def dispatch_tick(self: _Tick) -> None:
    """Sweep expired leases and publish what is due."""
    from outbox import maintenance

    maintenance.everywhere(lambda using: maintenance.dispatch(self.app, using=using))


@shared_task(base=_Tick, bind=True, name="outbox.reconcile")
def reconcile_tick(self: _Tick) -> None:
    """Compare the database with the broker, and repair."""
    from outbox import maintenance

    maintenance.everywhere(lambda using: maintenance.recover(self.app, using=using))


@shared_task(base=_Tick, bind=True, name="outbox.prune")
def prune_tick(self: _Tick) -> None:
    """Delete ended entries whose retention is past."""
    from outbox import maintenance

    maintenance.everywhere(lambda using: maintenance.prune(using=using))


@shared_task(
    base=OutboxTask,
    bind=True,
    name=TELL_OWNER,
    autoretry_for=(OSError, *_AWAY),
    retry_backoff=5,
    max_retries=12,
    ignore_result=True,
)
def tell_owner(self: OutboxTask, *args: str, over_age: int = 0) -> None:
    """Tell an owner, by one e-mail, of all that has been noted: `args` are owner and database.

    Entries of before there were notices have the ID of the one entry as a first argument more, and
    tell of that one: how it stands, or that `over_age` of its task have been owed for too long.
    """
    from outbox import owners

    if len(args) == 3:
        owners.tell_of_one(*args, over_age=over_age)
    elif (current := run.current(self)) is not None:  # called plainly, it has nothing to tell
        owners.tell(current.claim, owner=args[0])


@shared_task(
    base=OutboxTask,
    bind=True,
    name=FOLLOW,
    atomic=True,
    autoretry_for=(NotFollowed, *_AWAY),
    retry_backoff=5,
    max_retries=12,
    ignore_result=True,
)
def follow_end(
    self: OutboxTask,
    entry_id: str,
    kind: str,
    index: int,
    using: str,
    exception: Mapping[str, Any] | None = None,
    **told_of: Any,
) -> None:
    """Owe or call what follows an entry's end: one link, a chain's next step, one errback.

    `exception`: what it failed with, where a worker knew it, as Celery's backends store it.
    `told_of`: `result`, where a worker knew it, which the row may not keep.
    """
    told: Mapping[str, Any] = {"exception": exception, "told_of": told_of}
    follow.follow(self.app, UUID(entry_id), Kind(kind), index, **told, using=using)


def beat_schedule() -> dict[str, dict[str, Any]]:
    """The entries that celery-beat needs: `app.conf.beat_schedule |= beat_schedule()`.

    Each expires before the next is due, so that ticks do not pile up behind busy workers.
    """
    configured = settings()
    every = {
        "outbox.dispatch": configured.DISPATCH_EVERY,
        "outbox.reconcile": configured.RECONCILE_EVERY,
        "outbox.prune": 3600,
    }
    return {
        name: {
            "task": name,
            "schedule": timedelta(seconds=seconds),
            "options": {"expires": max(seconds, 1)},
        }
        for name, seconds in every.items()
    }

"""follow: what an entry's end owes besides: links, the next step of a chain, errbacks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

from celery import Celery
from celery.app.task import Context
from celery.canvas import Signature, maybe_signature
from celery.utils.functional import arity_greater
from django.db import transaction
from kombu.exceptions import OperationalError

from outbox.errors import EntryFailed, NotFollowed, PayloadError
from outbox.lifecycle.claim import Claim
from outbox.lifecycle.reconcile import told
from outbox.models import OutboxEntry
from outbox.transitions import FOLLOW, Kind, followers

if TYPE_CHECKING:
    from outbox.tasks import OutboxTask

logger = logging.getLogger("outbox")


def owe_links(task: OutboxTask, claim: Claim, result: Any) -> None:
    """Owe the links and the next step of a chain, in the transaction of a worker's success."""
    request, order = task.request, _order(task.app, claim)
    for index, link in enumerate(request.callbacks or ()):
        if not _left_to_follow(task.app, claim, Kind.LINK, index, link, step=link, result=result):
            _owe(task.app, link, (result,), order, using=claim.using)
    if rest := request.chain:
        *more, step = rest
        if not _left_to_follow(task.app, claim, Kind.CHAIN, 0, rest, step=step, result=result):
            _owe(task.app, step, (result,), {**order, "chain": more}, using=claim.using)


def _left_to_follow(
    app: Celery, claim: Claim, kind: Kind, index: int, what: Any, *, step: Any, result: Any
) -> bool:
    """Owe an entry of `outbox.follow` for what is no entry itself, as far as this worker knows.

    A plain task's message would be lost with a broker that is away after the commit; and what this
    worker does not know may be durable, in newer code. False: the row does not name it, since the
    body changed its request, or the result is too large for an entry.
    """
    if not _is_plain(app, maybe_signature(step, app=app)):
        return False
    if followers(claim.options, kind)[index : index + 1] != [what]:
        return False
    about = {"queue": claim.queue, "subject": claim.subject, "owner": claim.owner or None}
    order = {**_order(app, claim), "priority": claim.priority, "using": claim.using}
    named = (str(claim.id), kind.value, index, claim.using)
    try:
        app.tasks[FOLLOW].apply_async(named, {"result": result}, **about, **order)
    except PayloadError:
        return False
    return True


def _owe(
    app: Celery, link: Any, args: tuple[Any, ...], order: Mapping[str, Any], *, using: str
) -> None:
    signature = maybe_signature(link, app=app)
    publish = partial(signature.apply_async, args, **order, **_database(app, signature, using))
    if _is_plain(app, signature):
        # A plain task's message cannot be taken back: not before the ending has committed.
        transaction.on_commit(publish, using=using)
    else:
        publish()


def follow(
    app: Celery,
    entry_id: UUID,
    kind: Kind,
    index: int,
    *,
    exception: Mapping[str, Any] | None,
    told_of: Mapping[str, Any],
    using: str,
) -> None:
    """Owe, or call, one follower of an entry whose end is committed.

    `told_of` has the `result` that a link is given, where that need not be the stored one.

    Raises:
        NotFollowed: it cannot be done now: the broker is away, or the task is not known here.
        EntryFailed: the entry is no longer kept, so nobody knows any more what was to follow it.
    """
    entry = OutboxEntry.objects.using(using).filter(pk=entry_id).first()
    if entry is None:
        raise EntryFailed(f"the entry {entry_id} is no longer kept: what was to follow is lost")
    found = followers(entry.options, kind)[index:]
    result = told_of.get("result", entry.result)
    if not found:
        logger.warning("outbox.follow.nothing entry_id=%s: it was erased", entry_id)
    elif kind is Kind.ERRBACK:
        _call_errback(app, entry, found[0], exception)
    elif kind is Kind.LINK:
        _owe_now(app, entry, maybe_signature(found[0], app=app), result)
    else:
        *rest, step = found[0]
        _owe_now(app, entry, maybe_signature(step, app=app), result, chain=rest)


def _owe_now(
    app: Celery, entry: OutboxEntry, signature: Signature, told_of: Any, **more: Any
) -> None:
    """An entry commits with the caller's. A plain task's message goes now, and may go again."""
    _check_known(app, entry, signature)
    try:
        database = _database(app, signature, entry._state.db)
        signature.apply_async((told_of,), **_order(app, entry), **database, **more)
    except (OSError, OperationalError) as error:
        raise NotFollowed(f"{signature.task} could not be published: {error}") from error


def _check_known(app: Celery, entry: OutboxEntry, signature: Signature) -> None:
    """What a queue of another code base runs need not be known here; Celery sends it as well."""
    if signature.task in app.tasks or _is_composite(signature):
        return
    routed = app.amqp.router.route(dict(signature.options), signature.task).get("queue")
    ours = {entry.queue, app.amqp.default_queue.name}
    if routed is None or getattr(routed, "name", routed) in ours:
        raise NotFollowed(f"no worker of this queue knows a task {signature.task!r} yet")


def _call_errback(
    app: Celery, entry: OutboxEntry, errback: Any, exception: Mapping[str, Any] | None
) -> None:
    """As Celery does: called with (request, exc, traceback), or owed with the failed task's ID."""
    signature = maybe_signature(errback, app=app)
    if _takes_a_failure(app, signature):
        signature(_request(entry), _error(app, entry, exception), entry.traceback)
    else:
        _owe_now(app, entry, signature, str(entry.pk))


def _takes_a_failure(app: Celery, errback: Signature) -> bool:
    """By how many arguments the failure has to give, beside those that the signature has.

    What `bind=True` makes is owed, as by Celery, so that it may retry.
    """
    header = getattr(app.tasks.get(errback.task), "__header__", None)
    if header is None or isinstance(header, partial) or _is_composite(errback):
        return False
    if not errback.immutable and (errback.args or errback.kwargs):
        header = partial(header, *errback.args, **errback.kwargs)
    return bool(arity_greater(header, 1))


def _request(entry: OutboxEntry) -> Context:
    """The failed task's request, from its row."""
    headers = entry.options.get("headers") or {}
    return Context(
        headers,
        id=str(entry.pk),
        task=entry.task,
        args=entry.args,
        kwargs=entry.kwargs,
        retries=entry.retries,
        errbacks=followers(entry.options, Kind.ERRBACK),
        root_id=str(entry.root_id or entry.pk),
        parent_id=entry.parent_id and str(entry.parent_id),
        headers=headers,
        delivery_info={},
        called_directly=False,
    )


def _error(app: Celery, entry: OutboxEntry, stored: Mapping[str, Any] | None) -> BaseException:
    """What the worker stored of it, or else what the row says. Celery builds exceptions only."""
    try:
        error = app.backend.exception_to_python(stored)
    except Exception as why:  # it names something else than an exception, or nothing
        logger.warning("outbox.follow.unnamed entry_id=%s: %s", entry.pk, why)
        error = None
    if not isinstance(error, Exception):
        error = told.value(entry)
    return error if isinstance(error, Exception) else EntryFailed(entry.error)


def _order(app: Celery, of: Claim | OutboxEntry) -> dict[str, Any]:
    order: dict[str, Any] = {"parent_id": str(of.id), "root_id": str(of.root_id or of.id)}
    if app.conf.task_inherit_parent_priority:
        order["priority"] = of.priority
    return order


def _database(app: Celery, signature: Signature, using: str | None) -> dict[str, Any]:
    """An entry's follower is owed where that entry is, so that one transaction has both."""
    if _is_plain(app, signature) or _is_composite(signature):
        return {}
    return {"using": signature.options.get("using") or using}


def _is_plain(app: Celery, signature: Signature) -> bool:
    registered = app.tasks.get(signature.task)
    return not _is_composite(signature) and not getattr(registered, "is_durable", False)


def _is_composite(signature: Signature) -> bool:
    return signature.get("subtask_type") is not None

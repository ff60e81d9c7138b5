"""Tasks of the drill's own with effects in the ledger: only a person can be asked about them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from celery import shared_task

from outbox.drill import own_effects
from outbox.tasks import OutboxTask

NAMES = ("first", "second", "third")


@shared_task(base=OutboxTask, bind=True)
def pay(self: Any) -> Any:
    """One effect, which is not repeated."""
    return self.effect("payment", _pays(self))


@shared_task(base=OutboxTask, bind=True, max_crashes=1)
def pay_once(self: Any) -> Any:
    """The same, and given up at its first crash."""
    return self.effect("payment", _pays(self))


@shared_task(base=OutboxTask, bind=True)
def pay_thrice(self: Any) -> list[Any]:
    """Three effects, one after the other."""
    return [self.effect(name, _pays(self)) for name in NAMES]


@shared_task(base=OutboxTask, bind=True)
def pay_another(self: Any) -> Any:
    """Ask for something else in each process, under the same name: a mistake in the task."""
    return self.effect("payment", _pays(self), request={"by": os.getpid()})


def _pays(task: Any) -> Callable[[str], str]:
    def perform(key: str) -> str:
        own_effects.take(task.request.id, key=key)
        return key

    return perform


ALL = (pay, pay_once, pay_thrice, pay_another)

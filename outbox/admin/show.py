"""How an entry's facts look: everything that comes from a row is escaped."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from celery import current_app
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import mark_safe
from django.utils.text import Truncator

from outbox.conf import settings
from outbox.lifecycle.enqueue import durable_task
from outbox.words import span

HIDDEN = "•••"


def state(value: str) -> str:
    """A state with its colour; the word is there for those who see none."""
    return format_html('<span class="outbox-state outbox-{}">{}</span>', value, value)


def dotted(name: str) -> str:
    """A dotted name that may be broken at its dots, so that a narrow list has room for it."""
    return format_html_join(mark_safe(".<wbr>"), "{}", ((part,) for part in name.split(".")))


def age(moment: datetime) -> str:
    """How old: `5 min`, or `in 5 min`; the time itself on hover."""
    words = _from_now(moment).removesuffix(" ago")
    return format_html('<time class="nowrap" title="{}">{}</time>', at(moment), words)


def ago(moment: datetime) -> str:
    """`5 min ago`, or `in 5 min`; the time itself on hover."""
    return format_html('<time title="{}">{}</time>', at(moment), _from_now(moment))


def _from_now(moment: datetime) -> str:
    seconds = (timezone.now() - moment).total_seconds()
    return f"in {span(-seconds)}" if seconds < 0 else f"{span(seconds)} ago"


def at(moment: datetime) -> str:
    """The time, to the second, with its zone."""
    return f"{timezone.localtime(moment):%Y-%m-%d %H:%M:%S %Z}"


def moment(when: datetime) -> str:
    """The time, and how long that is from now."""
    return f"{at(when)} ({_from_now(when)})"


def first_line(text: str, *, length: int = 80) -> str:
    """What fits into a cell of a list."""
    return Truncator(text.strip().partition("\n")[0]).chars(length)


def block(text: str) -> str:
    """Text with its line breaks: a traceback, JSON."""
    return format_html('<pre class="outbox-text">{}</pre>', text) if text else ""


def as_json(value: Any) -> str:
    """JSON for reading, without the values of the keys in `OUTBOX["REDACT"]`."""
    return json.dumps(_hide(value, _secret()), indent=2, default=str, ensure_ascii=False)


def arguments(task: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A call's arguments as JSON; a positional one is hidden by its parameter's name."""
    names, secret = _parameters(task), _secret()
    shown = [HIDDEN if name.lower() in secret else value for name, value in _named(names, args)]
    return as_json({"args": shown, "kwargs": kwargs})


def _named(names: Sequence[str], args: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for position, value in enumerate(args):
        yield names[position] if position < len(names) else "", value


def _parameters(task: str) -> list[str]:
    """The names of a task's parameters, where this process has its code."""
    found = durable_task(current_app, task)
    return list(inspect.signature(found.run).parameters) if found else []


def _secret() -> frozenset[str]:
    return frozenset(name.lower() for name in settings().REDACT)


def _hide(value: Any, secret: Collection[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            name: HIDDEN if str(name).lower() in secret else _hide(item, secret)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_hide(item, secret) for item in value]
    return value

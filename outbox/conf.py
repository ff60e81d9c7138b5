"""The `OUTBOX` setting: one dict, checked and frozen when it is first used. Times are seconds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from typing import Any

from django.conf import settings as django_settings
from django.core.signals import setting_changed
from django.dispatch import receiver

from outbox.errors import ConfigurationError

DAY = 86_400
SHORTEST_LEASE = 1.0  # seconds
LARGEST = 10**9  # of every number; as seconds, 31 years: a date can still be that far away


def _retention() -> Mapping[str, float]:
    return {"succeeded": 7 * DAY, "failed": 30 * DAY, "cancelled": 30 * DAY}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Defaults and meanings of `OUTBOX`; the attribute names are its keys."""

    LEASE: float = 30  # how long a claim holds without renewal
    DISPATCH_EVERY: float = 1
    RECONCILE_EVERY: float = 30
    STRAND_GRACE: float = 60  # how long a published entry is left alone
    OVER_AGE: float = 300
    BATCH_SIZE: int = 500  # rows a dispatch
    REPAIRS_PER_PASS: int = 1000
    PUBLISH_TIMEOUT: float = 2  # bound on one flush to the broker
    BREAKER: float = 5  # after a failed flush, leave the broker alone for so long
    MAX_PAYLOAD_BYTES: int = 262_144
    RETENTION: Mapping[str, float] = field(default_factory=_retention)  # final state → seconds
    CRASH_BACKOFF: float = 5  # the first; doubles up to 600, jittered
    MAX_CRASHES: int = 3
    OWNERS: Mapping[str, Collection[str]] = field(default_factory=dict)  # name → addresses
    DEFAULT_OWNER: str = ""
    TELL_EVERY: float = 300  # an owner gets at most one message in so many seconds
    REDACT: Collection[str] = ()
    CODEC: str = ""  # reserved
    PAUSED: bool = False
    HEARTBEAT_FILE: str = ""  # reserved
    LISTEN_DSN: str = ""  # reserved
    DATABASES: Collection[str] = ("default",)


KEYS = {item.name: item for item in fields(Settings)}
_MAPPINGS = {"RETENTION", "OWNERS"}
# Names that are fixed, for what is to come: silence would promise what is not there.
_RESERVED = ("CODEC", "HEARTBEAT_FILE", "LISTEN_DSN")
_COLLECTIONS = {"REDACT", "DATABASES"}
RANGE = f"greater than 0 and at most {LARGEST:,}"
_POSITIVE = {name for name in KEYS if isinstance(KEYS[name].default, int | float)} - {"PAUSED"}


@cache
def settings() -> Settings:
    """The settings of this process.

    Raises:
        ConfigurationError: an unknown key, a wrong type or values that cannot work together.
    """
    given = getattr(django_settings, "OUTBOX", {})
    if not isinstance(given, Mapping):
        raise ConfigurationError("OUTBOX must be a dict of settings.")
    for name, value in given.items():
        _check(name, value)
    return _consistent(Settings(**_merged(given)))


def default_database() -> str:
    """The alias of the first of `OUTBOX["DATABASES"]`, where nothing else is said."""
    return next(iter(settings().DATABASES))


def _merged(given: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(given)
    if "RETENTION" in merged:
        merged["RETENTION"] = {**_retention(), **merged["RETENTION"]}
    return merged


def _check(name: str, value: Any) -> None:
    if name not in KEYS:
        close = get_close_matches(str(name), KEYS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else f" Known are {', '.join(KEYS)}."
        raise ConfigurationError(f"OUTBOX has no setting {name!r}.{hint}")
    if not _fits(name, value):
        raise ConfigurationError(f"OUTBOX[{name!r}] cannot be {value!r}: {_expected(name)}.")
    if name == "RETENTION":
        _check_retention(value)
    if name == "OWNERS":
        _check_owners(value)


def _check_retention(value: Mapping[Any, Any]) -> None:
    for state, seconds in value.items():
        if state not in _retention():
            known = ", ".join(_retention())
            raise ConfigurationError(f"OUTBOX['RETENTION'] has {state!r}: it takes {known}.")
        if not in_range(seconds, int | float):
            raise ConfigurationError(
                f"OUTBOX['RETENTION'][{state!r}] cannot be {seconds!r}: it takes seconds, {RANGE}."
            )


def _check_owners(value: Mapping[Any, Any]) -> None:
    for owner, addresses in value.items():
        if not _is_list(addresses) or not all(map(_is_address, addresses)):
            raise ConfigurationError(
                f"OUTBOX['OWNERS'][{owner!r}] cannot be {addresses!r}: it takes a list of "
                "addresses, each a text with an '@'."
            )


def _is_address(value: Any) -> bool:
    return isinstance(value, str) and "@" in value


def _is_list(value: Any) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)


def in_range(value: Any, kind: Any) -> bool:
    """Whether it is a number of that kind, of a setting's or a task's option, that can be used."""
    # NaN compares as False, and infinity is too large.
    return isinstance(value, kind) and not isinstance(value, bool) and 0 < value <= LARGEST


def _fits(name: str, value: Any) -> bool:
    if name in _POSITIVE:
        return in_range(value, int if KEYS[name].type == "int" else int | float)
    if name in _MAPPINGS:
        return isinstance(value, Mapping)
    if name in _COLLECTIONS:
        return _is_list(value)
    return isinstance(value, bool if name == "PAUSED" else str)


def _expected(name: str) -> str:
    if name in _POSITIVE:
        whole = "a whole number" if KEYS[name].type == "int" else "a number"
        return f"it takes {whole} {RANGE}"
    if name in _MAPPINGS:
        return "it takes a dict"
    if name in _COLLECTIONS:
        return "it takes a list of names"
    return "it takes True or False" if name == "PAUSED" else "it takes a string"


def _consistent(found: Settings) -> Settings:
    if found.LEASE < SHORTEST_LEASE:
        raise ConfigurationError(
            f"OUTBOX['LEASE'] must be at least {SHORTEST_LEASE:g} second: in that span it is "
            "renewed three times."
        )
    if found.LEASE < 3 * found.DISPATCH_EVERY:
        raise ConfigurationError(
            "OUTBOX['LEASE'] must be at least three times DISPATCH_EVERY: where no worker lives, "
            "the ticks alone say that the database was in reach for a whole lease."
        )
    if found.STRAND_GRACE < 2 * found.DISPATCH_EVERY:
        raise ConfigurationError(
            "OUTBOX['STRAND_GRACE'] must be at least twice DISPATCH_EVERY, or entries count as "
            "stranded before a worker had the time to take them."
        )
    for name in _RESERVED:
        if getattr(found, name):
            raise ConfigurationError(
                f"OUTBOX[{name!r}] is a reserved name that has no effect yet: leave it out."
            )
    if not found.DATABASES:
        raise ConfigurationError("OUTBOX['DATABASES'] must name at least one database alias.")
    if found.DEFAULT_OWNER and found.DEFAULT_OWNER not in found.OWNERS:
        raise ConfigurationError(
            f"OUTBOX['DEFAULT_OWNER'] is {found.DEFAULT_OWNER!r}, which OUTBOX['OWNERS'] does "
            "not have: add its addresses there."
        )
    return found


@receiver(setting_changed)
def _forget(*, setting: str, **_: Any) -> None:
    if setting == "OUTBOX":
        settings.cache_clear()

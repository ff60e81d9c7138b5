"""Times and numbers as people read them, alike in the admin and in the commands."""

from __future__ import annotations

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def span(seconds: float) -> str:
    """A length of time in its largest unit: `42 s`, `5 min`, `3 h`, `12 d`."""
    whole = max(0, int(seconds))
    size, unit = next(((size, unit) for size, unit in _UNITS if whole >= 2 * size), _UNITS[-1])
    return f"{whole // size} {unit}"


def counted(count: int, one: str, many: str = "") -> str:
    """The count with its noun: `1 entry`, `2,000 entries`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def shortened(text: str, limit: int) -> str:
    """The text, or its beginning and an ellipsis where it is longer than so many characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"

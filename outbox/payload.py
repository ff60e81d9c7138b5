"""Arguments and results as JSON that PostgreSQL takes.

kombu's encoder carries UUID, datetime, Decimal and bytes. They come back as they went in. Numbers
come back equal, but not always alike: `jsonb` keeps them as numeric, so that the float 1e22 comes
back as an int, and -0.0 as 0.0.

What `jsonb` would refuse is refused
here, in the caller and before any SQL: inside the caller's transaction the error would abort it.
"""

from __future__ import annotations

import json
import re
from typing import Any

from django.db import models
from kombu.utils import json as kombu_json

from outbox.errors import PayloadError

_REFUSED = re.compile(r"\\u0000|\\ud[89a-f][0-9a-f]{2}", re.IGNORECASE)
# json.loads with a hook would build a decoder for each call.
_STRICT = json.JSONDecoder(object_hook=kombu_json.object_hook)
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def dumps(value: Any) -> str:
    """Encode for storage.

    Raises:
        PayloadError: not JSON (naming the type), or text that `jsonb` refuses: NUL, a lone
            surrogate, NaN or an infinity.
    """
    try:
        text: str = kombu_json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise PayloadError(f"cannot be stored as JSON: {error}") from error
    # ensure_ascii turns a real character above U+FFFF into a pair: look at the decoded text then.
    if _REFUSED.search(text):
        _refuse_bad_text(value)
    return text


def loads(text: str) -> Any:
    """Decode what is stored. A dict that only looks like a value of kombu's comes back as it is.

    One row that could not be read would otherwise stop each pass that meets it.
    """
    return _LENIENT.decode(text)


def as_received(text: str) -> Any:
    """Decode as whoever receives a message will.

    Raises:
        ValueError, TypeError: kombu could not, and would drop the message.
    """
    return _STRICT.decode(text)


def _typed(found: dict[str, Any]) -> Any:
    try:
        return kombu_json.object_hook(found)
    except Exception:  # whatever a type's own decoder raises
        return found


_LENIENT = json.JSONDecoder(object_hook=_typed)


def _refuse_bad_text(value: Any) -> None:
    plain = json.dumps(kombu_json.loads(kombu_json.dumps(value)), ensure_ascii=False, default=str)
    if "\\u0000" in plain.replace("\\\\", ""):
        raise PayloadError("cannot be stored: PostgreSQL refuses NUL characters (\\x00) in JSON")
    if _SURROGATE.search(plain):
        raise PayloadError("cannot be stored: it has a lone surrogate, which is not valid text")


def clean(text: str, *, limit: int) -> str:
    """Text that PostgreSQL stores whatever it says, capped to `limit` characters in the middle."""
    text = _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\x00", "\\x00"))
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


class _Encoder(json.JSONEncoder):
    def encode(self, o: Any) -> str:
        return dumps(o)


class _Decoder(json.JSONDecoder):
    def decode(self, s: str, *_: Any) -> Any:
        return loads(s)


class PayloadField(models.JSONField):
    """A `jsonb` column through kombu's encoder."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["encoder"] = _Encoder
        kwargs["decoder"] = _Decoder
        super().__init__(*args, **kwargs)

    def deconstruct(self) -> Any:
        name, path, args, kwargs = super().deconstruct()
        del kwargs["encoder"], kwargs["decoder"]
        return name, path, args, kwargs

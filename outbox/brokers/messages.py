"""What a message in a Redis list says, read without decoding it: a million are looked at."""

from __future__ import annotations

import re
from binascii import unhexlify
from collections.abc import Sequence
from functools import cache
from struct import Struct

# The ID also stands in headers.id. The correlation ID is read since no argument can forge it (the
# body is base64, quotes in a repr are escaped), and the last one, since the properties come last.
# Separators as kombu's json writes them; any others are found by the slower expression.
_MARK = b'"correlation_id": "'
_ID = re.compile(rb'"correlation_id":\s*"([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})"')
_TEXT = len("01234567-89ab-cdef-0123-456789abcdef")
_BYTES = Struct("16s")


def ids(raws: Sequence[bytes]) -> Sequence[bytes | None]:
    """The ID of each message, as 16 bytes; None where it has none that is a UUID."""
    begin = len(_MARK)
    texts = [raw[(at := raw.rfind(_MARK) + begin) : at + _TEXT] for raw in raws]
    try:
        packed = unhexlify(b"".join(texts).replace(b"-", b""))
    except ValueError:
        packed = b""
    if len(packed) != _BYTES.size * len(raws):  # at least one is no UUID: each for itself
        return [_id(raw) for raw in raws]
    return [found for (found,) in _BYTES.iter_unpack(packed)]


def _id(raw: bytes) -> bytes | None:
    found = _ID.findall(raw)
    return unhexlify(found[-1].replace(b"-", b"")) if found else None


def header(raw: bytes, name: str) -> str:
    """The text of a message's header; empty where it has none."""
    found = _header(name).search(raw)
    return found[1].decode(errors="replace") if found else ""


@cache
def _header(name: str) -> re.Pattern[bytes]:
    return re.compile(rb'"%b":\s*"([^"\\]*)"' % re.escape(name.encode()))

"""By a provider's HTTP API, which drops what comes again under a key and can be asked for it."""

from __future__ import annotations

import json
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlencode, urlsplit

from django.conf import settings
from django.core.mail import EmailMultiAlternatives

from outbox.effects import NOT_FOUND, Found, NotFound, NotPerformed
from receipts.way import Way

# By these the provider says that it took nothing. 409 is not among them: it says that something
# was taken under this key, such as the same receipt before its template was changed. Nor are 500,
# 502 and 504, which may come from a proxy whose provider had done it.
NOT_TAKEN = {400, 401, 403, 404, 405, 411, 413, 415, 422, 429, 503}

STEPS = 3  # to connect, to send and to be answered may each take the whole timeout
TAKEN, FOUND, ABSENT = 202, 200, 404


class ProviderError(OSError):
    """The provider's answer was not what was hoped for. An OSError, as those of SMTP are."""


def way() -> Way:
    """Asked by the key, or sent again under it, or left to a person, as the settings say."""
    return Way(
        send=send,
        verify=look_up if settings.RECEIPTS_PROVIDER_LOOKUP else None,
        on_uncertain=settings.RECEIPTS_WHEN_UNCERTAIN,
        timeout=STEPS * settings.RECEIPTS_TIMEOUT,
    )


def send(message: EmailMultiAlternatives, key: str) -> dict[str, Any]:
    """Hand the message over; the provider's ID of it.

    Raises:
        NotPerformed: no connection, or an answer by which nothing was taken.
        OSError: it may have been taken.
    """
    body = json.dumps(_as_json(message)).encode()
    try:
        connection = _connected()
    except OSError as error:
        raise NotPerformed(str(error)) from error
    headers = {"Content-Type": "application/json", "Idempotency-Key": key}
    status, answer = _asked(connection, "POST", "", body=body, headers=headers)
    if status == TAKEN:
        return {"id": answer.get("id")}
    unexpected = _unexpected(status, answer)
    if status in NOT_TAKEN:
        raise NotPerformed(str(unexpected)) from unexpected
    raise unexpected


def look_up(key: str) -> Found | NotFound:
    """What became of the message with that key.

    Raises:
        OSError: the provider did not say.
    """
    status, answer = _asked(_connected(), "GET", f"?{urlencode({'key': key})}")
    if status == FOUND:
        return Found({"id": answer.get("id")})
    # Only in the provider's own words: a proxy, or a wrong address, answers 404 to everything.
    if status == ABSENT and "error" in answer:
        return NOT_FOUND
    raise _unexpected(status, answer)


def _as_json(message: EmailMultiAlternatives) -> dict[str, Any]:
    return {
        "from": message.from_email,
        "to": list(message.to),
        "subject": message.subject,
        "text": message.body,
        "html": str(message.alternatives[0][0]),
        "headers": dict(message.extra_headers),
    }


def _connected() -> HTTPConnection:
    """Connected before anything is said, so that all that fails later may have been heard."""
    url = urlsplit(settings.RECEIPTS_PROVIDER_URL)
    kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
    connection = kind(str(url.hostname), url.port, timeout=settings.RECEIPTS_TIMEOUT)
    try:
        connection.connect()
    except BaseException:
        connection.close()
        raise
    return connection


def _asked(
    connection: HTTPConnection,
    method: str,
    query: str,
    *,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, dict[str, Any]]:
    headers = dict(headers or {})
    if settings.RECEIPTS_PROVIDER_TOKEN:
        headers["Authorization"] = f"Bearer {settings.RECEIPTS_PROVIDER_TOKEN}"
    path = f"{urlsplit(settings.RECEIPTS_PROVIDER_URL).path}/messages{query}"
    with closing(connection):
        try:
            connection.request(method, path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, _words(answer.read())
        except HTTPException as error:
            raise ProviderError(f"The provider's answer is no HTTP: {error!r}") from error


def _words(raw: bytes) -> dict[str, Any]:
    """An answer's JSON; nothing where a proxy answered in words of its own."""
    try:
        words = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return words if isinstance(words, dict) else {}


def _unexpected(status: int, answer: dict[str, Any]) -> ProviderError:
    return ProviderError(f"The provider answered {status}: {answer.get('error', 'no reason')}")

"""The receipt as the recovery drill's subject: an order placed on the page, a mail received."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from http.client import HTTPException
from http.cookiejar import CookieJar
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, build_opener
from uuid import UUID, uuid4

from outbox.drill.subject import OWNER_ADDRESS, Effect, Kind, Mode, Placed
from receipts.provider import MailProvider
from receipts.smtp import MailDestination
from shop.models import Order

HTTP_SECONDS = 30
PROVIDER_SECONDS = 2  # short, so that a point need not wait long for a provider that is silent
_TOKEN = re.compile(r'name="csrfmiddlewaretoken" value="(\w+)"')
_JOB = re.compile(r'data-job-id="([0-9a-f-]{36})"')


class ReceiptSubject:
    """A customer orders ink and is owed a receipt by e-mail.

    By SMTP, and sent again where nobody knows, unless one of `kinds` is on top of `settings`.
    """

    task = "receipts.tasks.send_receipt"
    celery_app = "shop"
    effect, business = "receipt", "order"
    kind: Kind = "blind"
    deduplication = (
        "each mail of a job carries the same Message-ID, by which the receiving side can tell "
        "a repetition; SMTP itself neither drops one nor can be asked"
    )

    kinds: Mapping[str, Mapping[str, Any]] = {
        "verified": {
            "RECEIPTS_BY": "provider",
            "RECEIPTS_PROVIDER_LOOKUP": True,
            "RECEIPTS_TIMEOUT": PROVIDER_SECONDS,
        },
        "keyed": {
            "RECEIPTS_BY": "provider",
            "RECEIPTS_PROVIDER_LOOKUP": False,
            "RECEIPTS_WHEN_UNCERTAIN": "repeat",
            "RECEIPTS_TIMEOUT": PROVIDER_SECONDS,
        },
        "repeated": {"RECEIPTS_BY": "smtp", "RECEIPTS_WHEN_UNCERTAIN": "repeat"},
        "parked": {"RECEIPTS_BY": "smtp", "RECEIPTS_WHEN_UNCERTAIN": "park"},
    }

    def __init__(self) -> None:
        self._running = ExitStack()
        self._provider = MailProvider()
        self._mails = MailDestination(always_accept=[OWNER_ADDRESS])
        self.settings: dict[str, Any] = {
            "RECEIPTS_BY": "smtp",
            "RECEIPTS_WHEN_UNCERTAIN": "repeat",
            "EMAIL_BACKEND": "django.core.mail.backends.smtp.EmailBackend",
            "EMAIL_USE_TLS": False,
            "EMAIL_HOST_USER": "",
            "EMAIL_TIMEOUT": 60,  # longer than any point lets the destination hang
            # Read when the task is bound; its backoff is fixed when it is defined: 0 to 3 s here.
            "CELERY_TASK_ANNOTATIONS": {self.task: {"max_retries": 2}},
        }

    def start(self, env: dict[str, str]) -> None:
        self._running.enter_context(self._mails)
        self._running.enter_context(self._provider)
        env.update(
            EMAIL_HOST=self._mails.host,
            EMAIL_PORT=str(self._mails.port),
            RECEIPTS_PROVIDER_URL=self._provider.url,
        )

    def place(self, base_url: str) -> Placed:
        placed = Placed(reference=f"drill-{uuid4().hex[:12]}@customer.example")
        try:
            return self._order(base_url, placed)
        except HTTPError:
            raise  # an answer, and a wrong one
        except (OSError, HTTPException):  # the web died before it answered
            return placed

    def _order(self, base_url: str, placed: Placed) -> Placed:
        browser = build_opener(HTTPCookieProcessor(CookieJar()))
        url = f"{base_url}/orders/new/"
        with browser.open(url, timeout=HTTP_SECONDS) as answer:
            token = _TOKEN.findall(answer.read().decode())[0]
        form = {"email": placed.reference, "quantity_ink": "1", "csrfmiddlewaretoken": token}
        data = urlencode(form).encode()
        with browser.open(url, data=data, timeout=HTTP_SECONDS) as answer:
            job = _JOB.findall(answer.read().decode())[0]
            order = answer.url.rstrip("/").rpartition("/")[2]
        return replace(placed, business_id=order, job_id=UUID(job))

    def find(self, placed: Placed) -> Placed:
        order = Order.objects.filter(email=placed.reference).first()
        if order is None:
            return Placed(reference=placed.reference)
        return replace(placed, business_id=str(order.pk), job_id=order.receipt_job)

    def destination(self, mode: Mode) -> None:
        """Both servers; only the provider can be silent, and the other is well then."""
        self._mails.behave("ok" if mode == "silent" else mode)
        self._provider.behave(mode)

    def hanging(self) -> int:
        return self._mails.hanging + self._provider.hanging

    def effects(self, placed: Placed) -> list[Effect]:
        return [
            Effect(key=mail.message_id, at=mail.at)
            for mail in [*self._mails.received, *self._provider.received]
            if placed.reference in mail.recipients
        ]

    def requests(self, placed: Placed) -> int:
        """Only of the provider: SMTP has no request that could be counted without its mail."""
        return sum(placed.reference in request.to for request in self._provider.requests)

    def owner_mails(self, job_id: UUID) -> int:
        text = str(job_id).encode()
        return sum(
            OWNER_ADDRESS in mail.recipients and text in mail.raw for mail in self._mails.received
        )

    def cleanup(self) -> None:
        self._running.close()

"""The receipt, broken in one way each, by settings of the drilled processes alone."""

from __future__ import annotations

from receipts.drill import ReceiptSubject


class Doubling(ReceiptSubject):
    """Every mail arrives twice."""

    def __init__(self) -> None:
        super().__init__()
        self.settings["EMAIL_BACKEND"] = "tests.drills.SendsTwice"


class Swallowing(ReceiptSubject):
    """The task succeeds, and no mail leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.settings["EMAIL_BACKEND"] = "django.core.mail.backends.dummy.EmailBackend"


class Paused(ReceiptSubject):
    """Nobody publishes what a dead process left."""

    def __init__(self) -> None:
        super().__init__()
        self.settings["OUTBOX"] = {"PAUSED": True}


class Misused(ReceiptSubject):
    """The web answers every order with an error: no arguments are small enough."""

    def __init__(self) -> None:
        super().__init__()
        self.settings["OUTBOX"] = {"MAX_PAYLOAD_BYTES": 1}


class NotStarting(ReceiptSubject):
    """Its worker cannot be started."""

    celery_app = "nowhere_to_be_found"

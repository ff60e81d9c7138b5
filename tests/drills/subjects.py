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


class Plain(ReceiptSubject):
    """The receipt is a plain Celery task: there is no record of what is owed."""

    def __init__(self) -> None:
        super().__init__()
        self.settings["CELERY_TASK_ANNOTATIONS"] = {self.task: {"max_retries": 2, "durable": False}}


class NotStarting(ReceiptSubject):
    """Its worker cannot be started."""

    celery_app = "nowhere_to_be_found"

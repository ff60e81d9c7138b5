"""Subjects that are broken on purpose: a drill that cannot fail proves nothing."""

from __future__ import annotations

from collections.abc import Sequence

from django.core.mail import EmailMessage
from django.core.mail.backends.smtp import EmailBackend


class SendsTwice(EmailBackend):
    """A mail gateway that hands over every message twice."""

    def send_messages(self, email_messages: Sequence[EmailMessage]) -> int:
        return super().send_messages([*email_messages, *email_messages])

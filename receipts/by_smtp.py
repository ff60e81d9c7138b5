"""By SMTP: the server can neither be asked nor told to drop what comes again."""

from __future__ import annotations

import smtplib
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from django.conf import settings
from django.core.mail import EmailMultiAlternatives, get_connection
from django.core.mail.backends.base import BaseEmailBackend
from django.core.mail.backends.smtp import EmailBackend

from outbox.effects import NotPerformed
from receipts.way import Way

# Answers of a server that took nothing. Without an answer nobody knows: it may have got lost.
REFUSED = (
    smtplib.SMTPHeloError,
    smtplib.SMTPNotSupportedError,
    smtplib.SMTPSenderRefused,
    smtplib.SMTPRecipientsRefused,
)
NEGATIVE = range(400, 600)


def way() -> Way:
    """Repeated under the same Message-ID, or left to a person, as the settings say."""
    return Way(send=send, on_uncertain=settings.RECEIPTS_WHEN_UNCERTAIN)


def send(message: EmailMultiAlternatives, key: str) -> None:
    """Send the mail by Django's e-mail backend. SMTP has no use for the key.

    Raises:
        NotPerformed: no connection, or a refusal; its cause is the error.
        OSError: the server may have taken it.
    """
    with _connected() as connection:
        message.connection = connection
        try:
            message.send()
        except REFUSED as error:
            raise NotPerformed(str(error)) from error
        except smtplib.SMTPDataError as error:
            # smtplib raises it for every reply but 250, also for one that it could not read.
            if error.smtp_code in NEGATIVE:
                raise NotPerformed(str(error)) from error
            raise


@contextmanager
def _connected() -> Iterator[BaseEmailBackend]:
    """A connection that is open, so that all that fails later has met a server."""
    connection = get_connection()
    try:
        _open(connection)
        yield connection
    finally:
        with suppress(OSError):  # a goodbye that fails takes nothing back
            connection.close()


def _open(connection: BaseEmailBackend) -> None:
    try:
        connection.open()
        if isinstance(connection, EmailBackend) and connection.connection is not None:
            # Django greets only where it logs in; smtplib would greet in the middle of sending.
            connection.connection.ehlo_or_helo_if_needed()
    except OSError as error:
        raise NotPerformed(str(error)) from error

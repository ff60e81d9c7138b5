"""A real SMTP server on this machine, for drill, demo and tests: it keeps what it accepts."""

import asyncio
import socket
from collections.abc import Awaitable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, get_args

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, Envelope, Session

from receipts.destination import MailFolder, Received, listen, received_mail

Mode = Literal["ok", "refuse", "hang"]

ACCEPTED = "250 2.0.0 OK"
REFUSED = "450 4.2.1 This mailbox takes no mail at the moment"


class MailDestination:
    """A mail server in a thread of this process; use it as a context manager, also repeatedly.

    It keeps every mail that it accepts in `received`, and as `<number>-<message id>.eml` in
    `folder` where one is given. Port 0 takes a free one; `port` then tells which, and
    a second start takes it again.
    Recipients in `always_accept` are served in every mode.

    Raises CannotListen where the port is taken.
    """

    def __init__(
        self,
        *,
        folder: Path | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        always_accept: Collection[str] = (),
    ) -> None:
        self.host = host
        self.port = port
        self._folder = MailFolder(folder) if folder else None
        self._always_accept = frozenset(always_accept)
        self._mode: Mode = "ok"
        self._mode_changed = asyncio.Event()
        self._received: list[Received] = []
        self._hanging = 0
        self._controller: _Controller | None = None

    def __enter__(self) -> Self:
        listener = listen(self.host, port=self.port)
        self.port = listener.getsockname()[1]
        self._mode_changed = asyncio.Event()  # belongs to one event loop, and so to one start
        self._controller = _Controller(self, listener=listener)
        self._controller.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._controller is not None:
            self._controller.stop()
            self._controller = None

    @property
    def received(self) -> list[Received]:
        """What was accepted so far, in order; a copy, from any thread."""
        return list(self._received)

    @property
    def hanging(self) -> int:
        """How many mails were taken whole and wait for an answer now."""
        return self._hanging

    def behave(self, mode: Mode) -> None:
        """Change how mails are answered, from now on and for those that hang; from any thread.

        ok: accept. refuse: every recipient is refused for the moment (450). hang: take the whole
        mail, and never answer. A mail whose client went away meanwhile was not accepted.
        """
        if mode not in get_args(Mode):
            raise ValueError(f"{mode!r} is not a behaviour; choose one of {get_args(Mode)}.")
        self._mode = mode
        if self._controller is not None:
            self._controller.loop.call_soon_threadsafe(self._wake_those_that_hang)

    # aiosmtpd calls the handle_* methods by name, on the server's own thread.

    async def handle_RCPT(
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        if self._refuses([address]):
            return REFUSED
        envelope.rcpt_tos.append(address)
        return ACCEPTED

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:
        await self._hang(envelope.rcpt_tos)
        if self._refuses(envelope.rcpt_tos):
            return REFUSED
        self._keep(envelope)
        return ACCEPTED

    async def _hang(self, recipients: Sequence[str]) -> None:
        """Wait as long as the mode demands it; cancelled when the client goes away."""
        self._hanging += 1
        try:
            while self._mode == "hang" and not self._always(recipients):
                await self._mode_changed.wait()
        finally:
            self._hanging -= 1

    def _always(self, recipients: Sequence[str]) -> bool:
        return self._always_accept.issuperset(recipients)

    def _refuses(self, recipients: Sequence[str]) -> bool:
        return self._mode == "refuse" and not self._always(recipients)

    def _wake_those_that_hang(self) -> None:
        self._mode_changed.set()
        self._mode_changed = asyncio.Event()

    def _keep(self, envelope: Envelope) -> None:
        raw = envelope.original_content or b""
        mail = received_mail(raw, recipients=envelope.rcpt_tos)
        if self._folder is not None:
            self._folder.keep(mail)
        self._received.append(mail)


class _Controller(Controller):
    """Runs the server's event loop in a thread, on a socket that is listening already.

    aiosmtpd's own controller cannot tell which port 0 became, takes five seconds to notice that
    a port is taken, and on stopping waits for, or forgets, connections that are still open.
    """

    def __init__(self, handler: MailDestination, *, listener: socket.socket) -> None:
        super().__init__(handler, hostname=handler.host, port=handler.port)
        self._listener = listener

    def _create_server(self) -> Awaitable[asyncio.AbstractServer]:
        return self.loop.create_server(self._factory_invoker, sock=self._listener)

    def stop(self, no_assert: bool = False) -> None:
        asyncio.run_coroutine_threadsafe(self._hang_up(), self.loop).result()
        super().stop(no_assert=no_assert)

    async def _hang_up(self) -> None:
        if self.server is not None:
            self.server.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

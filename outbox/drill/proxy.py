"""A wire to PostgreSQL that can swallow one reply and break, or fall silent.

It knows as much of the protocol as that takes: which statement is run (by its text, or by the name
under which its text was prepared) and where the server's reply to it ends.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

ENCRYPTION = (80877103, 80877104)  # what is asked before the startup message: SSL, GSSAPI

_BROKEN = (IncompleteReadError, ConnectionError, OSError)


class Proxy:
    """Forwards each connection to a server, until it is told which reply to swallow."""

    def __init__(self, host: str, port: int) -> None:
        self.server = (host, port)
        self.port = 0
        self.swallowed: list[str] = []  # what the server had answered: its command's tag
        self._needle: bytes = b""
        self._wires: set[_Wire] = set()
        self._loop = asyncio.new_event_loop()

    def swallow(self, needle: str) -> None:
        """The next statement whose text has `needle` reaches the server, its reply nobody.

        Once the server has answered, and so has committed, both connections are cut.
        """
        self._needle = needle.encode()

    def silence(self, startup: str = "") -> None:
        """Nothing passes over the connections that there are any more, not even their end.

        As when a firewall has forgotten them. New ones work.

        :param startup: only those that have this in their startup message, as a database's name.
        """
        for wire in list(self._wires):
            wire.silent = wire.silent or startup.encode() in wire.startup

    @property
    def armed(self) -> bool:
        return bool(self._needle)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Listen on a free port of 127.0.0.1, in a thread."""
        thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        thread.start()
        server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(self._close(server), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
            self._loop.close()

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._forward, "127.0.0.1", 0)

    async def _close(self, server: asyncio.Server) -> None:
        server.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _forward(self, reader: StreamReader, writer: StreamWriter) -> None:
        # Its cancelling too: asyncio's streams log that as an error.
        with suppress(*_BROKEN, asyncio.CancelledError):
            theirs, to_server = await asyncio.open_connection(*self.server)
            wire = _Wire(self, to_server=to_server, to_client=writer)
            self._wires.add(wire)
            try:
                await wire.start(reader, theirs)
                await _first_of(wire.requests(reader), wire.replies(theirs))
                await wire.pass_on()
            finally:
                self._wires.discard(wire)
                writer.close()
                to_server.close()

    def hits(self, text: bytes) -> bool:
        """Whether this is the statement; it is that only once."""
        if not self._needle or self._needle not in text:
            return False
        self._needle = b""
        return True


class _Wire:
    """One client's connection and the one to the server that belongs to it."""

    def __init__(self, proxy: Proxy, *, to_server: StreamWriter, to_client: StreamWriter) -> None:
        self.proxy, self.to_server, self.to_client = proxy, to_server, to_client
        self.prepared: dict[bytes, bytes] = {}  # text by name
        self.swallowing = False
        self.silent = False
        self.startup = b""

    async def start(self, client: StreamReader, server: StreamReader) -> None:
        """What comes before the first message with a type: perhaps a refused encryption."""
        while True:
            head = await client.readexactly(8)
            length, code = struct.unpack("!II", head)
            self.startup = await client.readexactly(length - 8)
            self.to_server.write(head + self.startup)
            if code not in ENCRYPTION:
                return
            self.to_client.write(await server.readexactly(1))

    async def pass_on(self) -> None:
        """Return, unless it is silent: then never."""
        if self.silent:
            await asyncio.Future()

    async def requests(self, client: StreamReader) -> None:
        while True:
            kind, body = await _message(client)
            await self.pass_on()
            self.swallowing = self.swallowing or self._is_hit(kind, body)
            self.to_server.write(_bytes(kind, body))
            await self.to_server.drain()

    async def replies(self, server: StreamReader) -> None:
        tag = ""
        while True:
            kind, body = await _message(server)
            await self.pass_on()
            if not self.swallowing:
                self.to_client.write(_bytes(kind, body))
                await self.to_client.drain()
            elif kind == b"C":
                tag = body.rstrip(b"\0").decode()
            elif kind == b"Z" and tag:  # ready for the next: this one has committed
                self.proxy.swallowed.append(tag)
                return

    def _is_hit(self, kind: bytes, body: bytes) -> bool:
        if kind == b"P":  # Parse: name, text
            name, text, *_ = body.split(b"\0")
            self.prepared[name] = text
        elif kind == b"B":  # Bind: portal, name
            name = body.split(b"\0")[1]
            return self.proxy.hits(self.prepared.get(name, b""))
        return kind == b"Q" and self.proxy.hits(body)


async def _first_of(*both: Coroutine[Any, Any, None]) -> None:
    tasks = [asyncio.create_task(one) for one in both]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _message(reader: StreamReader) -> tuple[bytes, bytes]:
    kind, length = struct.unpack("!cI", await reader.readexactly(5))
    return kind, await reader.readexactly(length - 4)


def _bytes(kind: bytes, body: bytes) -> bytes:
    return struct.pack("!cI", kind, len(body) + 4) + body

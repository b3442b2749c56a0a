"""A small keep-alive HTTP/1.1 client for the shard's hot path: one request in flight a connection, no pool limit.

A request is sent again by itself only when a reused connection closed before the first byte of a reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import httptools


class ConnectionFailed(Exception):
    """No connection, or it closed before the reply was whole."""


class ReplyTimeout(Exception):
    """The reply was not whole within the deadline."""


@dataclass(frozen=True)
class Reply:
    """A whole reply. ``retry_after`` is in seconds, where the peer tells it."""

    status: int
    body: bytes
    retry_after: int | None = None


class _Connection(asyncio.Protocol):
    """One connection; the parser calls back the ``on_`` methods."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.reply: asyncio.Future[Reply] | None = None
        self.started = False
        self.reusable = False
        self._body: list[bytes] = []
        self._retry_after: int | None = None
        self._parser = httptools.HttpResponseParser(self)

    @property
    def idle(self) -> bool:
        return self.reusable and self.transport is not None and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self, parts: Sequence[bytes]) -> asyncio.Future[Reply]:
        """Write one request; the future is its reply. The parts are not joined: they may be large."""
        assert self.transport is not None
        self.reply = asyncio.get_running_loop().create_future()
        self.started = self.reusable = False
        self._body, self._retry_after = [], None
        self._parser = httptools.HttpResponseParser(self)
        self.transport.writelines(parts)
        return self.reply

    def data_received(self, data: bytes) -> None:
        self.started = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"unreadable reply: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"connection closed: {exc or 'by the peer'}")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after" and value.isdigit():
            self._retry_after = int(value)

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self.reusable = self._parser.should_keep_alive()
        if self.reply is not None and not self.reply.done():
            self.reply.set_result(Reply(self._parser.get_status_code(), b"".join(self._body), self._retry_after))

    def _fail(self, reason: str) -> None:
        self.reusable = False
        if self.transport is not None:
            self.transport.abort()
        if self.reply is not None and not self.reply.done():
            self.reply.set_exception(ConnectionFailed(reason))


class HttpClient:
    """Requests to one host. Cancelling a request closes its connection, which is how a call is aborted upstream."""

    def __init__(self, host: str, port: int, connect_timeout_s: float = 5.0) -> None:
        self._host, self._port, self._connect_timeout_s = host, port, connect_timeout_s
        self._idle: list[_Connection] = []

    async def request(self, method: str, path: str, body: Sequence[bytes], timeout_s: float) -> Reply:
        """The reply to a body in parts. Raises ConnectionFailed, or ReplyTimeout after ``timeout_s``."""
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\n"
            f"content-type: application/json\r\ncontent-length: {sum(map(len, body))}\r\n\r\n"
        ).encode()
        while True:
            connection, reused = await self._connect()
            try:
                async with asyncio.timeout(timeout_s):
                    reply = await connection.send((head, *body))
            except ConnectionFailed:
                if reused and not connection.started:
                    continue
                raise
            except TimeoutError as error:
                raise ReplyTimeout(f"no whole reply to {method} {path} within {timeout_s:.0f} s") from error
            finally:
                self._release(connection)
            return reply

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._close(self._idle.pop())

    async def _connect(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if connection.idle:
                return connection, True
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, fresh = await loop.create_connection(_Connection, self._host, self._port)
        except (OSError, TimeoutError) as error:
            raise ConnectionFailed(f"cannot connect to {self._host}:{self._port}: {error!r}") from error
        return fresh, False

    def _release(self, connection: _Connection) -> None:
        if connection.idle:
            self._idle.append(connection)
        else:
            self._close(connection)

    @staticmethod
    def _close(connection: _Connection) -> None:
        if connection.transport is not None:
            connection.transport.abort()

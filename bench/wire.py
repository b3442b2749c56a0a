"""The generator's HTTP client: one keep-alive connection, as a harness holds it, at little cost."""

from __future__ import annotations

import asyncio
from typing import NamedTuple, cast

import httptools


class Reply(NamedTuple):
    """A whole reply."""

    status: int
    body: bytes
    retry_after_s: float | None


class Dropped(Exception):
    """No connection, or it closed before the reply was whole; ``started``: a part had come."""

    def __init__(self, reason: str, started: bool) -> None:
        super().__init__(reason)
        self.started = started


class _Stream(asyncio.Protocol):
    """One TCP connection; the parser calls back the ``on_`` methods."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.started = False
        self._reply: asyncio.Future[Reply] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._retry_after: float | None = None

    @property
    def open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self, data: bytes) -> asyncio.Future[Reply]:
        assert self.transport is not None
        self.started, self._body, self._retry_after = False, [], None
        self._parser = httptools.HttpResponseParser(self)
        self._reply = asyncio.get_running_loop().create_future()
        self.transport.write(data)
        return self._reply

    def data_received(self, data: bytes) -> None:
        self.started = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"unreadable reply: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"closed: {exc or 'by the peer'}")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self._retry_after = float(value)

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(Reply(self._parser.get_status_code(), b"".join(self._body), self._retry_after))
        if not self._parser.should_keep_alive():
            self.close()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def _fail(self, reason: str) -> None:
        self.close()
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(Dropped(reason, self.started))


class Connection:
    """Requests to one address, one after the other; opened when needed."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self.host, self.port, self.timeout_s = host, port, timeout_s
        self._stream: _Stream | None = None

    async def request(self, method: str, path: str, headers: str = "", body: bytes = b"") -> Reply:
        """The reply. ``headers``: whole lines. Raises Dropped, or TimeoutError after ``timeout_s``.

        A kept connection that the server closed in the meantime is opened again, as every HTTP library does.
        """
        head = f"{method} {path} HTTP/1.1\r\nhost: {self.host}:{self.port}\r\ncontent-type: application/json\r\n"
        data = f"{head}{headers}content-length: {len(body)}\r\n\r\n".encode() + body
        async with asyncio.timeout(self.timeout_s):
            if self._stream is not None and self._stream.open:
                try:
                    return await self._exchange(self._stream, data)
                except Dropped as drop:
                    if drop.started:
                        raise
            return await self._exchange(await self._connect(), data)

    def close(self) -> None:
        """Close the connection; the next request opens one."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    async def _exchange(self, stream: _Stream, data: bytes) -> Reply:
        try:
            return await stream.send(data)
        except BaseException:
            self.close()
            raise

    async def _connect(self) -> _Stream:
        loop = asyncio.get_running_loop()
        try:
            _, self._stream = await loop.create_connection(_Stream, self.host, self.port)
        except OSError as error:
            raise Dropped(f"cannot connect: {error}", started=False) from error
        return self._stream

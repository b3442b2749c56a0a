"""A shard's HTTP servers: uvicorn's protocol on a listening socket that somebody else opened."""

from __future__ import annotations

import asyncio
import socket
from asyncio.events import TimerHandle
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

BACKLOG = 4096  # connections that wait while a shard is replaced; the kernel may allow fewer
KEEP_ALIVE_S = 3600  # harnesses idle as long as their tools run
READ_S = 60.0  # a request must have arrived so long after its first byte, unless the listener says otherwise
DRAIN_S = 30.0  # a client that does not read an answer for so long did not get it
DRAIN_POLL_S = 0.02
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, with what an application must know of its client: that it left, is slow, has its answer.

    ``on_lost`` is called when the client leaves; ``read_s`` is how long a request may take to arrive.
    """

    read_s = READ_S
    lost = False
    slow = False
    on_lost: Callable[[], object] | None = None
    _in_headers = False
    _deadline: TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._arrived()
        if self.on_lost is not None:
            self.on_lost()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self._deadline = self.loop.call_later(self.read_s, self._too_slow)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._arrived()
        super().on_message_complete()

    def _arrived(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        """Wake the application that waits for the rest of a body; without one, end the connection."""
        self.slow = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.message_event.set()
            return
        if self._in_headers:
            self.transport.write(TOO_SLOW)
        self.transport.close()

    async def drained(self) -> bool:
        """Whether everything written went to a live connection."""
        await asyncio.sleep(0)  # a leave that the kernel already knows of is seen first
        for _ in range(int(DRAIN_S / DRAIN_POLL_S)):
            if self.lost or self.transport.get_write_buffer_size() == 0:
                break
            await asyncio.sleep(DRAIN_POLL_S)
        return not self.lost and self.transport.get_write_buffer_size() == 0


class Listener:
    """The server on one listening socket."""

    def __init__(self, server: asyncio.Server, state: ServerState) -> None:
        self._server, self._state = server, state

    @classmethod
    async def open(cls, listener: socket.socket, app: Any, config: uvicorn.Config, read_s: float = READ_S) -> Listener:
        """Serve an app on a socket that already listens."""
        state = ServerState()
        loop = asyncio.get_running_loop()

        def connect() -> Connection:
            connection = Connection(config, state, {}, loop)
            connection.app, connection.read_s = app, read_s
            connection.app_state["connection"] = connection
            return connection

        listener.setblocking(False)
        return cls(await loop.create_server(connect, sock=listener, backlog=BACKLOG), state)

    def close(self) -> None:
        """Stop listening and drop every connection."""
        self._server.close()
        for connection in list(self._state.connections):
            connection.transport.abort()

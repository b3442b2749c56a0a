"""A shard's HTTP servers: uvicorn's protocol on a listening socket that somebody else opened."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

BACKLOG = 4096  # connections that wait while a shard is replaced; the kernel may allow fewer
KEEP_ALIVE_S = 3600  # harnesses idle as long as their tools run
DRAIN_S = 30.0  # a client that does not read an answer for so long did not get it


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, which also lets an application see whether its bytes left."""

    lost = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        super().connection_lost(exc)

    async def drained(self) -> bool:
        """Whether everything written went to a live connection."""
        await asyncio.sleep(0)  # a leave that the kernel already knows of is seen first
        for _ in range(int(DRAIN_S / 0.02)):
            if self.lost or self.transport.get_write_buffer_size() == 0:
                break
            await asyncio.sleep(0.02)
        return not self.lost and self.transport.get_write_buffer_size() == 0


class Listener:
    """The server on one listening socket."""

    def __init__(self, server: asyncio.Server, state: ServerState) -> None:
        self._server, self._state = server, state

    @classmethod
    async def open(cls, listener: socket.socket, app: Any, config: uvicorn.Config) -> Listener:
        """Serve an app on a socket that already listens."""
        state = ServerState()
        loop = asyncio.get_running_loop()

        def connect() -> Connection:
            connection = Connection(config, state, {}, loop)
            connection.app = app
            connection.app_state["connection"] = connection
            return connection

        listener.setblocking(False)
        return cls(await loop.create_server(connect, sock=listener, backlog=BACKLOG), state)

    def close(self) -> None:
        """Stop listening and drop every connection."""
        self._server.close()
        for connection in list(self._state.connections):
            connection.transport.abort()

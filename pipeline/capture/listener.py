"""A shard's HTTP servers: uvicorn's protocols on a listening socket that somebody else opened."""

from __future__ import annotations

import asyncio
import logging
import socket
from asyncio.events import TimerHandle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from pipeline.capture.origin import Origin

BACKLOG = 4096  # connections that wait while a shard is replaced; the kernel may allow fewer
KEEP_ALIVE_S = 3600  # harnesses idle as long as their tools run
READ_S = 60.0  # a request must have arrived so long after its first byte, unless the listener says otherwise
BURST = 200  # connections accepted at once
REST_S = 0.5  # before accepting goes on when there were no descriptors left
LOOKUP_S = 5.0  # a call waits so long to learn who makes it
DRAIN_S = 30.0  # a client that does not take what was written for so long is dropped
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

log = logging.getLogger(__name__)


class Cork:
    """Stands in for a transport and keeps what is written to it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._pieces: list[bytes] = []
        self._closing = False

    def write(self, data: bytes) -> None:
        """Keep a piece."""
        self._pieces.append(data)

    def close(self) -> None:
        """Close the transport behind what was kept."""
        self._closing = True

    def is_closing(self) -> bool:
        """Whether the transport is, or soon will be."""
        return self._closing or self._transport.is_closing()

    def release(self) -> None:
        """Let everything go."""
        self._transport.writelines(self._pieces)
        if self._closing:
            self._transport.close()


@contextmanager
def corked(cycle: RequestResponseCycle) -> Iterator[None]:
    """What a reply writes inside goes out in one system call."""
    transport = cycle.transport
    cork = Cork(transport)
    cycle.transport = cast(asyncio.Transport, cork)
    try:
        yield
    finally:
        cycle.transport = transport
        cork.release()


class Watched(asyncio.Protocol):
    """What an application must know of its client: that it left, is slow, has its answer. For uvicorn's protocols.

    ``on_lost`` is called when the client leaves; ``read_s`` is how long a request may take to arrive.
    """

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    read_s = READ_S
    lost = False
    _done = False  # the client had asked that the connection be closed behind its answer, and it was
    slow = False
    on_lost: Callable[[], object] | None = None
    _deaf: TimerHandle | None = None
    _unsent = False  # something written is not with the kernel yet
    _sent: asyncio.Future[bool] | None = None
    _origin: asyncio.Future[Origin] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).set_write_buffer_limits(high=0)  # tell of every byte that waits
        super().connection_made(transport)

    async def origin(self) -> Origin:
        """Who the client is: looked up once, when it came in."""
        if self._origin is None:
            return Origin.UNSEEN
        if not self._origin.done():
            await asyncio.wait([self._origin], timeout=LOOKUP_S)
        return self._origin.result() if self._origin.done() else Origin.UNKNOWN

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._hears()
        self._tell(self._done)
        if self.on_lost is not None:
            self.on_lost()
        super().connection_lost(exc)

    async def drained(self) -> bool:
        """Whether everything written went to a live connection."""
        await asyncio.sleep(0)  # a leave that the kernel already knows of is seen first
        if self.lost or not self._unsent:
            return self._done or not self.lost
        self._sent = self.loop.create_future()
        try:
            return await self._sent
        finally:
            self._sent = None

    def pause_writing(self) -> None:
        self._unsent = True
        self._deaf = self.loop.call_later(DRAIN_S, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._unsent = False
        self._hears()
        self._tell(True)
        super().resume_writing()

    def _hears(self) -> None:
        if self._deaf is not None:
            self._deaf.cancel()
            self._deaf = None

    def _tell(self, sent: bool) -> None:
        """The bytes that a ``drained`` waits for have gone, or never will."""
        if self._sent is not None and not self._sent.done():
            self._sent.set_result(sent)


class Connection(Watched, HttpToolsProtocol):
    """uvicorn's HTTP protocol, watched. ``inspect`` tells in a thread who holds the connection from a port."""

    inspect: Callable[[int], Origin] | None = None
    _in_headers = False
    _deadline: TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.inspect is not None and self.client is not None:
            self._origin = self.loop.run_in_executor(None, self.inspect, self.client[1])

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        cycle = self.cycle
        self._done = exc is None and cycle is not None and cycle.response_complete and not cycle.keep_alive
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

    def _should_upgrade(self) -> bool:
        """Only a GET becomes a WebSocket, and not before the answers to earlier requests are out."""
        idle = self.cycle is None or (self.cycle.response_complete and not self._unsent)
        return idle and self.scope["method"] == "GET" and super()._should_upgrade()


class Listener:
    """The server on one listening socket.

    It accepts what waits all at once: uvloop's own server takes one connection an iteration of the loop, and under load
    a burst of new clients would wait for as many iterations.
    """

    def __init__(self, listener: socket.socket, connect: Callable[[], Connection], state: ServerState) -> None:
        self._listener, self._connect, self._state = listener, connect, state
        self._loop = asyncio.get_running_loop()
        self._arriving: set[asyncio.Task[Any]] = set()
        self._rest: TimerHandle | None = None
        self._loop.add_reader(listener, self._accept)

    @classmethod
    async def open(
        cls,
        listener: socket.socket,
        app: Any,
        config: uvicorn.Config,
        read_s: float = READ_S,
        inspect: Callable[[int], Origin] | None = None,
    ) -> Listener:
        """Serve an app on a socket that already listens; it is closed with the server."""
        state = ServerState()
        loop = asyncio.get_running_loop()

        def connect() -> Connection:
            connection = Connection(config, state, {}, loop)
            connection.app, connection.read_s, connection.inspect = app, read_s, inspect
            connection.app_state["connection"] = connection
            return connection

        listener.setblocking(False)
        listener.listen(BACKLOG)
        return cls(listener, connect, state)

    def _accept(self) -> None:
        for _ in range(BURST):
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors left: what waits goes on waiting
                log.warning("cannot accept a connection: %s", error)
                self._loop.remove_reader(self._listener)
                self._rest = self._loop.call_later(REST_S, self._loop.add_reader, self._listener, self._accept)
                return
            client.setblocking(False)
            task = self._loop.create_task(self._loop.connect_accepted_socket(self._connect, client))
            self._arriving.add(task)
            task.add_done_callback(self._arrived)

    def _arrived(self, task: asyncio.Task[Any]) -> None:
        self._arriving.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.info("a client left while it was let in: %s", error)

    def shut(self) -> None:
        """Take no new connections."""
        if self._rest is not None:
            self._rest.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    def close(self) -> None:
        """Stop listening and drop every connection."""
        self.shut()
        for task in self._arriving:
            task.cancel()
        for connection in list(self._state.connections):
            connection.transport.abort()

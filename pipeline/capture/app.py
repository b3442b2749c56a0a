"""What a listener serves: a bare ASGI application with the dialects' routes, and the delivery of answers.

Silence rules: what can fail runs before the headers; they wait for the answer for up to ``HEADERS_AFTER_S``, so that
native status codes stay possible, and then a stream starts with pings.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import zlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
import zstandard

from pipeline.capture import dialects
from pipeline.capture.dialects.base import (
    Action,
    ApiError,
    ChatRequest,
    Dialect,
    Fault,
    Route,
    agent_of,
    api_key,
    require,
)
from pipeline.capture.journal import Node
from pipeline.capture.listener import Connection
from pipeline.capture.session import Session
from pipeline.capture.turn import Turns

BODY_CAP = 64 * 2**20  # bytes, before and after decompression
HEADERS_AFTER_S = 20.0
PING_EVERY_S = 10.0
JSON, EVENTS = b"application/json", b"text/event-stream"

log = logging.getLogger(__name__)
Message = dict[str, Any]


class ClientLeft(Exception):
    """The client closed the connection."""


class Exchange:
    """One HTTP request and its reply."""

    def __init__(
        self, scope: Message, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: str = scope["query_string"].decode("latin-1")
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.connection: Connection = scope["state"]["connection"]
        self._receive, self._send = receive, send

    @property
    def host(self) -> str:
        """The host name by which the client reached us."""
        found = re.match(r"\[[^\]]*\]|[^:]*", self.headers.get("host", ""))
        return (found and found[0]) or "127.0.0.1"

    async def body(self) -> bytes:
        """The decompressed body. Raises ApiError(TOO_LARGE | INVALID) or ClientLeft."""
        length = self.headers.get("content-length", "0")
        if length.isdigit() and int(length) > BODY_CAP:
            raise _too_large()
        data = bytearray()
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            data += message.get("body", b"")
            more = message.get("more_body", False)
            if len(data) > BODY_CAP:
                raise _too_large()
        return decompress(bytes(data), self.headers.get("content-encoding", ""))

    async def left(self) -> None:
        """Returns when the client closes the connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, kind: bytes, *headers: tuple[bytes, bytes]) -> None:
        """Send status line and headers."""
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *headers]}
        )

    async def write(self, data: bytes, more: bool = False) -> None:
        """Send a piece of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def reply(self, status: int, payload: Any, *headers: tuple[bytes, bytes]) -> None:
        """Send a whole JSON reply."""
        data = msgspec.json.encode(payload)
        await self.start(status, JSON, (b"content-length", b"%d" % len(data)), *headers)
        await self.write(data)

    async def fail(self, dialect: Dialect, error: ApiError) -> None:
        """Send an error in the dialect."""
        headers = [(b"retry-after", b"%d" % error.retry_after)] if error.retry_after else []
        await self.reply(dialect.status(error), dialect.error(error), *headers)


class CaptureApp(ABC):
    """The ASGI application of a listener. Whose session a request is of is left to ``find``."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    @abstractmethod
    def find(self, key: str, exchange: Exchange) -> Session:
        """The session whose key this is. Raises ApiError."""

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        exchange = Exchange(scope, receive, send)
        dialect, route = dialects.find(exchange.method, exchange.path)
        try:
            await self._serve(dialect, route, exchange)
        except ApiError as error:
            self._turns.totals[f"status_{dialect.status(error)}"] += 1
            await exchange.fail(dialect, error)
        except ClientLeft:
            self._turns.totals["left_early"] += 1

    async def _serve(self, dialect: Dialect, route: Route | None, exchange: Exchange) -> None:
        if route is not None and route.open:
            await exchange.reply(200, {})
            return
        session = self.find(api_key(exchange.headers, exchange.query), exchange)
        if route is None:
            raise ApiError(Fault.NOT_FOUND, f"no such route: {exchange.method} {exchange.path}")
        await self._act(dialect, route.action, session, exchange)

    async def _act(self, dialect: Dialect, action: Action, session: Session, exchange: Exchange) -> None:
        if action is Action.MODELS:
            await exchange.reply(200, dialect.models(session.policy.model_name))
        else:
            request = dialect.parse(await exchange.body(), session.memo, exchange.path, exchange.query)
            request.agent = agent_of(exchange.headers)
            if action is Action.COUNT_TOKENS:
                tokens = await self._turns.prompt_tokens(session, request)
                await exchange.reply(200, dialect.token_count(tokens))
            else:
                await self._turn(dialect, session, request, exchange)

    async def _turn(self, dialect: Dialect, session: Session, request: ChatRequest, exchange: Exchange) -> None:
        """Answer while watching the client; a client that leaves cancels the answer, which aborts it in the engine."""
        turn = asyncio.create_task(self._turns.answer(session, request))
        session.turns.add(turn)
        gone = asyncio.create_task(exchange.left())
        try:
            await self._deliver(dialect, session, request, exchange, turn, gone)
        finally:
            gone.cancel()
            turn.cancel()
            await asyncio.wait((turn, gone))
            session.turns.discard(turn)

    async def _deliver(
        self,
        dialect: Dialect,
        session: Session,
        request: ChatRequest,
        exchange: Exchange,
        turn: asyncio.Task[Node],
        gone: asyncio.Task[None],
    ) -> None:
        streaming = False
        timeout = HEADERS_AFTER_S if request.stream else None
        while not turn.done():
            await asyncio.wait((turn, gone), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                return
            if not turn.done():
                if not streaming:
                    await exchange.start(200, EVENTS, (b"cache-control", b"no-cache"))
                streaming, timeout = True, PING_EVERY_S
                await exchange.write(dialect.ping, more=True)
        try:
            node = self._result(turn)
        except ApiError as error:
            if not streaming:
                raise
            await exchange.write(dialect.stream_error(error))
            return
        await self._send(dialect, request, exchange, node, streaming)
        if await exchange.connection.drained():
            self._turns.delivered(session, node)

    async def _send(
        self, dialect: Dialect, request: ChatRequest, exchange: Exchange, node: Node, streaming: bool
    ) -> None:
        if not request.stream:
            await exchange.reply(200, dialect.answer(request, node.answer))
            return
        if not streaming:
            await exchange.start(200, EVENTS, (b"cache-control", b"no-cache"))
        await exchange.write(dialect.events(request, node.answer))

    def _result(self, turn: asyncio.Task[Node]) -> Node:
        """The turn's call. Raises ApiError for anything else."""
        if turn.cancelled():
            raise ApiError(Fault.UNAVAILABLE, "the session is closing")
        error = turn.exception()
        if error is None:
            return turn.result()
        if isinstance(error, ApiError):
            raise error
        log.error("a turn failed", exc_info=error)
        self._turns.totals["internal_errors"] += 1
        raise ApiError(Fault.INTERNAL, "the capture proxy failed; see its log")


class SessionApp(CaptureApp):
    """One session's listener: nobody else's key is known here."""

    def __init__(self, session: Session, turns: Turns) -> None:
        super().__init__(turns)
        self._session = session

    def find(self, key: str, exchange: Exchange) -> Session:
        if not hmac.compare_digest(key.encode(), self._session.id.encode()):
            raise ApiError(Fault.UNAUTHORIZED, "unknown API key")
        return self._session


class SharedApp(CaptureApp):
    """A shard's listener for all its sessions. ``ports`` are those of all shards, this one's among them."""

    def __init__(self, sessions: Mapping[str, Session], turns: Turns, index: int, ports: Sequence[int]) -> None:
        super().__init__(turns)
        self._sessions, self._index, self._ports = sessions, index, ports

    def find(self, key: str, exchange: Exchange) -> Session:
        session = self._sessions.get(key)
        if session is not None:
            return session
        shard = shard_of(key)
        if shard is None or shard == self._index or shard >= len(self._ports):
            raise ApiError(Fault.UNAUTHORIZED, "unknown API key")
        url = f"http://{exchange.host}:{self._ports[shard]}"
        raise ApiError(Fault.MISDIRECTED, f"this key belongs to another shard of the proxy: its base URL is {url}")


def new_key(shard: int) -> str:
    """An API key, which is a session's id, that names its shard."""
    return f"yk{shard}-{secrets.token_hex(12)}"


def shard_of(key: str) -> int | None:
    """The shard that a key names."""
    found = re.match(r"yk(\d{1,4})-", key)
    return int(found[1]) if found else None


def decompress(data: bytes, encoding: str) -> bytes:
    """A body without its content encoding. Raises ApiError(TOO_LARGE | INVALID)."""
    if encoding in ("", "identity"):
        return data
    require(encoding in ("gzip", "deflate", "zstd"), f"unsupported content-encoding {encoding!r}")
    try:
        if encoding == "zstd":
            plain = zstandard.ZstdDecompressor().stream_reader(data).read(BODY_CAP + 1)
        else:
            plain = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32).decompress(data, BODY_CAP + 1)
    except (zlib.error, zstandard.ZstdError) as error:
        raise ApiError(Fault.INVALID, f"the body is no {encoding}: {error}") from error
    if len(plain) > BODY_CAP:
        raise _too_large()
    return plain


def _too_large() -> ApiError:
    return ApiError(Fault.TOO_LARGE, f"the body is larger than {BODY_CAP} bytes")

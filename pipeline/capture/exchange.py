"""One HTTP request and its reply, on bare ASGI: body in, JSON or events out, errors in the dialect."""

from __future__ import annotations

import re
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import zstandard
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pipeline.capture.dialects.base import ApiError, Dialect, Fault, require
from pipeline.capture.listener import Watched, corked

BODY_CAP = 64 * 2**20  # bytes, before and after decompression
JSON, EVENTS = b"application/json", b"text/event-stream"
HOST = re.compile(r"\[[^\]]*\]|[^:]*")

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Header = tuple[bytes, bytes]


class ClientLeft(Exception):
    """The client closed the connection."""


class Exchange:
    """One request and its reply."""

    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: str = scope["query_string"].decode("latin-1")
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.connection: Watched = scope["state"]["connection"]
        self._cycle: RequestResponseCycle = getattr(receive, "__self__")  # noqa: B009 (the protocol's own object)
        self._receive, self._send = receive, send

    @property
    def host(self) -> str:
        """The host name by which the client reached us."""
        found = HOST.match(self.headers.get("host", ""))
        return (found and found[0]) or "127.0.0.1"

    async def body(self) -> bytes:
        """The decompressed body. Raises ApiError(TOO_LARGE | SLOW_REQUEST | INVALID) or ClientLeft."""
        length = self.headers.get("content-length", "0")
        if length.isdigit() and int(length) > BODY_CAP:
            raise _too_large()
        parts, size = [], 0
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            parts.append(message["body"])
            size += len(parts[-1])
            more = message["more_body"]
            if size > BODY_CAP:
                raise _too_large()
            if more and self.connection.slow:
                raise ApiError(Fault.SLOW_REQUEST, f"the request did not arrive within {self.connection.read_s:g} s")
        return decompress(parts[0] if len(parts) == 1 else b"".join(parts), self.headers.get("content-encoding", ""))

    async def start(self, status: int, kind: bytes, *headers: Header) -> None:
        """Send status line and headers."""
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *headers]}
        )

    async def write(self, data: bytes, more: bool = False) -> None:
        """Send a piece of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def whole(self, status: int, kind: bytes, data: bytes, *headers: Header) -> None:
        """Send a whole reply in one write."""
        with corked(self._cycle):
            await self.start(status, kind, *headers)
            await self.write(data)

    async def reply(self, status: int, payload: Any, *headers: Header) -> None:
        """Send a whole JSON reply."""
        data = msgspec.json.encode(payload)
        await self.whole(status, JSON, data, (b"content-length", b"%d" % len(data)), *headers)

    async def fail(self, dialect: Dialect, error: ApiError) -> None:
        """Send an error in the dialect."""
        headers = [(b"retry-after", b"%d" % error.retry_after)] if error.retry_after else []
        if error.fault is Fault.SLOW_REQUEST:
            headers.append((b"connection", b"close"))
        await self.reply(dialect.status(error), dialect.error(error), *headers)


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

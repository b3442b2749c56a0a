"""HTTP by hand, for requests that no client library would send, and the smallest request of each dialect."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

KEY = "raw-key"
TEXT = "caf\u00e9 \u2192 \U0001f600"


@dataclass(frozen=True)
class Smallest:
    """The smallest request of a dialect that says ``text``."""

    path: str
    other: str  # a path that looks like this dialect's and is not there

    def body(self, text: str = TEXT) -> dict[str, Any]:
        if "generateContent" in self.path or "GenerateContent" in self.path:
            return {"contents": [{"role": "user", "parts": [{"text": text}]}]}
        if self.path.endswith("responses"):
            return {"model": "m", "input": text}
        return {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": text}]}


DIALECTS = {
    "chat": Smallest("/v1/chat/completions", "/v1/embeddings"),
    "responses": Smallest("/v1/responses", "/v1/responses/compact"),
    "anthropic": Smallest("/v1/messages", "/v1/messages/batches"),
    "gemini": Smallest("/v1beta/models/maker/model-1:generateContent", "/v1beta/models/m:embedContent"),
}
KEY_PLACES = {
    "bearer": ("", f"authorization: Bearer {KEY}"),
    "lower": ("", f"Authorization: bearer  {KEY}"),
    "x-api-key": ("", f"X-Api-Key: {KEY}"),
    "x-goog-api-key": ("", f"x-goog-api-key: {KEY}"),
    "query": (f"?alt=json&key={KEY}", "x-nothing: 1"),
}


@dataclass
class Reply:
    """A response as it came."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def error(self, dialect: str) -> str:
        """The words of an error, which must be in the dialect's own shape."""
        body = self.json
        if dialect == "anthropic":
            assert body["type"] == "error" and body["error"]["type"], body
        elif dialect == "gemini":
            assert body["error"]["code"] == self.status and body["error"]["status"].isupper(), body
        else:
            assert set(body["error"]) == {"message", "type", "param", "code"}, body
        return str(body["error"]["message"])


@dataclass
class Wire:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    port: int = field(default=0)

    async def send(self, *pieces: bytes, pause_s: float = 0.0) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(pause_s)

    async def reply(self, method: str = "POST") -> Reply:
        """The next response. Raises IncompleteReadError when the connection ends first."""
        async with asyncio.timeout(20):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head.strip().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            status = int(first.split()[1])
            if status == 100:
                return Reply(status, headers, b"")
            if headers.get("transfer-encoding") == "chunked":
                return Reply(status, headers, await self._chunks())
            length = 0 if method == "HEAD" else int(headers.get("content-length", 0))
            return Reply(status, headers, await self.reader.readexactly(length))

    async def _chunks(self) -> bytes:
        data = b""
        while size := int(await self.reader.readline(), 16):
            data += (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readline()
        return data

    def leave(self) -> None:
        self.writer.transport.abort()


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[Wire]:
    """A connection to the proxy."""
    wire = Wire(*await asyncio.open_connection("127.0.0.1", port), port)
    try:
        yield wire
    finally:
        wire.leave()


def head(path: str, *headers: str, method: str = "POST") -> bytes:
    """The head of a request."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: x", *headers, "", ""]).encode()


def request(path: str, body: bytes, *headers: str, key: str = KEY_PLACES["bearer"][1], method: str = "POST") -> bytes:
    """A whole request."""
    return head(path, f"content-length: {len(body)}", key, *headers, method=method) + body


def chunked(body: bytes, size: int) -> list[bytes]:
    """A body in chunks of ``size`` bytes."""
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    return [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces] + [b"0\r\n\r\n"]

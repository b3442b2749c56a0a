"""A running proxy for the tests: a scripted engine, the real supervisor with its shard processes, real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from pipeline.capture.app import SessionApp
from pipeline.capture.journal import Journal, Policy
from pipeline.capture.listener import Listener
from pipeline.capture.session import Session
from pipeline.capture.shard import server_config
from pipeline.capture.supervisor import ShardSupervisor
from pipeline.capture.turn import EngineTurns
from pipeline.capture.upstream import Engine
from pipeline.config import SessionPolicy
from pipeline.engine.scripted import FakeEngine

BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


@dataclass
class Harness:
    """A client that holds one session's key and keeps its history."""

    key: str
    http: httpx.AsyncClient

    async def ask(self, messages: list[dict[str, Any]], **fields: Any) -> httpx.Response:
        body = {"model": "any/name", "messages": messages, **fields}
        headers = {"authorization": f"Bearer {self.key}"}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    async def message(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        reply = await self.ask(messages, **fields)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["message"]

    async def insist(self, messages: list[dict[str, Any]], tries: int = 2) -> dict[str, Any]:
        """Ask, and again when the connection was dropped: what harnesses do. Each death of a shard costs a try."""
        for _ in range(tries - 1):
            with contextlib.suppress(httpx.TransportError):
                return await self.message(messages)
        return await self.message(messages)


@dataclass
class Proxy:
    """The parts of a running proxy."""

    engine: FakeEngine
    supervisor: ShardSupervisor

    @contextlib.asynccontextmanager
    async def session(self, key: str, send_buffer: int | None = None, **policy: Any) -> AsyncIterator[Harness]:
        """An open session and a client of it; ``send_buffer`` bytes of an answer fit into the proxy's socket."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            if send_buffer:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
            port = listener.getsockname()[1]
            await self.supervisor.open_session(key, SessionPolicy(**policy), listener, "policy")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, verify=False) as http:
            yield Harness(key, http)

    def pids(self) -> list[int]:
        return [shard.pid for shard in self.supervisor._shards if shard.pid]


class Proxies:
    """Makes proxies in a test's event loop."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @contextlib.asynccontextmanager
    async def run(
        self, shards: int = 1, outage_s: float = 5.0, engine: FakeEngine | None = None, path: str = "", **options: str
    ) -> AsyncIterator[Proxy]:
        engine = engine or FakeEngine()
        await engine.start()
        supervisor = ShardSupervisor(engine.url + path, shards, self.directory, "policy", outage_s=outage_s, **options)
        try:
            await supervisor.start(30)
            yield Proxy(engine, supervisor)
        finally:
            await supervisor.stop()
            await engine.stop()


def events(text: str) -> list[Any]:
    """The data of a Chat Completions stream, without its end mark."""
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def eventually(condition: Any, what: str, seconds: float = 10) -> None:
    """Wait until a condition holds."""
    for _ in range(int(seconds / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"waited {seconds} s for {what}")


def deaf_client(port: int, body: dict[str, object], key: str = "k") -> socket.socket:
    """A client that sends a request and never reads."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect(("127.0.0.1", port))
    data = json.dumps(body).encode()
    head = f"POST /chat/completions HTTP/1.1\r\nauthorization: Bearer {key}\r\ncontent-length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    return client


@contextlib.asynccontextmanager
async def serve_session(
    journal: Path, outage_s: float = 5.0, read_s: float = 60.0, max_tokens: int = 100, send_buffer: int | None = None
) -> AsyncIterator[tuple[FakeEngine, Session, str]]:
    """One session served in this event loop: engine, session and base URL."""
    engine = FakeEngine()
    await engine.start()
    session = Session("k", Policy(1.0, max_tokens, 10, "policy"))
    turns = EngineTurns(Engine(engine.url, "policy", outage_s=outage_s), Journal(journal))
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = await Listener.open(listener, SessionApp(session, turns), server_config(ping_s=0.1), read_s)
    try:
        yield engine, session, url
    finally:
        server.close()
        await engine.stop()

"""What a listener does when a client dawdles or the disk is full; in this process, so that the waits can be short."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from proxy_helpers import deaf_client, eventually, serve_session

from pipeline.capture import delivery, listener
from pipeline.capture import journal as journal_module
from pipeline.engine.scripted import Scripted

BODY = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
HEAD = f"POST /chat/completions HTTP/1.1\r\nauthorization: Bearer k\r\ncontent-length: {len(BODY)}\r\n\r\n".encode()
HEADERS = {"authorization": "Bearer k"}


async def _reply(url: str, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """Send pieces with a pause after each, and read until the server closes."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause_s)
        return await asyncio.wait_for(reader.read(), 5)
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("pieces", "in_dialect"),
    [([HEAD[:20]], False), ([HEAD[:20], HEAD[20:30]], False), ([HEAD], True), ([HEAD, BODY[:9]], True)],
)
def test_a_request_that_does_not_arrive_is_cut(tmp_path: Path, pieces: list[bytes], in_dialect: bool) -> None:
    async def run() -> None:
        async with serve_session(tmp_path / "j", read_s=0.4) as (engine, session, url):
            reply = await _reply(url, *pieces, pause_s=0.1)
            assert reply.startswith(b"HTTP/1.1 408") and b"connection: close" in reply
            assert (b"did not arrive within 0.4 s" in reply) is in_dialect
            assert not session.turns and engine.rendered == []

    asyncio.run(run())


def test_a_slow_answer_is_no_slow_request(tmp_path: Path) -> None:
    async def run() -> None:
        async with serve_session(tmp_path / "j", read_s=0.3) as (engine, _, url), httpx.AsyncClient() as http:
            engine.script += [Scripted("one", delay_s=0.8), Scripted("two")]
            for text in ("one", "two"):  # the second one on the same connection
                reply = await http.post(f"{url}/chat/completions", content=BODY, headers=HEADERS)
                assert reply.json()["choices"][0]["message"]["content"] == text
                await asyncio.sleep(0.5)

    asyncio.run(run())


def test_a_full_disk_costs_the_answers_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = [True]
    write = os.write

    def scarce(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(journal_module.os, "write", scarce)

    async def run() -> None:
        async with serve_session(tmp_path / "j") as (_, session, url), httpx.AsyncClient() as http:

            async def ask(text: str) -> httpx.Response:
                body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
                return await http.post(f"{url}/chat/completions", json=body, headers=HEADERS)

            room[0] = False
            for number, text in enumerate(("first", "first", "second"), 1):
                failed = await ask(text)
                assert failed.status_code == 500 and "capture proxy failed" in failed.json()["error"]["message"]
                assert session.counters["journal_failures"] == number and session.tree.nodes == []
            room[0] = True
            assert [(await ask(text)).status_code for text in ("first", "second")] == [200, 200]
            await eventually(lambda: all(node.delivered for node in session.tree.nodes), "the deliveries")
            kept = [type(record).__name__ for record in journal_module.read(tmp_path / "j")]
            assert kept.count("Answered") == kept.count("Delivered") == 2 == len(session.tree.nodes)

    asyncio.run(run())


@pytest.mark.parametrize("delay_s", [0.0, 0.5])
def test_a_client_that_does_not_read_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delay_s: float
) -> None:
    """Whether its stream has begun or not; what it was sent is not delivered."""
    monkeypatch.setattr(listener, "DRAIN_S", 0.5)
    monkeypatch.setattr(delivery, "HEADERS_AFTER_S", 0.1)
    monkeypatch.setattr(delivery, "PING_EVERY_S", 0.1)

    async def run() -> None:
        async with serve_session(tmp_path / "j", max_tokens=10**7, send_buffer=4096) as (engine, session, url):
            engine.script.append(Scripted("a" * 190_000, delay_s=delay_s))
            body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
            client = await asyncio.to_thread(deaf_client, urlsplit(url).port or 0, body)
            await eventually(lambda: session.tree.nodes and not session.turns, "the end of the turn")
            assert not session.tree.nodes[0].delivered
            client.close()

    asyncio.run(run())

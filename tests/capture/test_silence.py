"""What a streaming client hears while the answer takes long; in this process, so that the waits can be short."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn
from proxy_helpers import eventually
from scripted_engine import FakeEngine, Scripted

from pipeline.capture import delivery
from pipeline.capture.app import SessionApp
from pipeline.capture.journal import Journal, Policy
from pipeline.capture.listener import Listener
from pipeline.capture.session import Session
from pipeline.capture.turn import EngineTurns
from pipeline.capture.upstream import Engine

MESSAGES = [{"role": "user", "content": "x"}]
HEADERS = {"authorization": "Bearer k"}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "HEADERS_AFTER_S", 0.15)
    monkeypatch.setattr(delivery, "PING_EVERY_S", 0.1)


@contextlib.asynccontextmanager
async def serve(journal: Path, outage_s: float = 5.0) -> AsyncIterator[tuple[FakeEngine, Session, str]]:
    """One session served in this event loop: engine, session and base URL."""
    engine = FakeEngine()
    await engine.start()
    session = Session("k", Policy(1.0, 100, 10, "policy"))
    turns = EngineTurns(Engine(engine.url, "policy", outage_s=outage_s), Journal(journal))
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn.Config(lambda: None, lifespan="off", ws="none", log_config=None)
    server = await Listener.open(listener, SessionApp(session, turns), config)
    try:
        yield engine, session, url
    finally:
        server.close()
        await engine.stop()


def test_a_slow_stream_is_kept_alive_and_ends_well(tmp_path: Path) -> None:
    async def run() -> None:
        async with serve(tmp_path / "j") as (engine, session, url), httpx.AsyncClient() as http:
            engine.script.append(Scripted("at last", delay_s=0.5))
            body = {"messages": MESSAGES, "stream": True}
            reply = await http.post(f"{url}/chat/completions", json=body, headers=HEADERS)
            assert reply.text.startswith(": ping\n\n: ping\n\n") and reply.text.endswith("data: [DONE]\n\n")
            assert "at last" in reply.text
            await eventually(lambda: session.tree.nodes[0].delivered, "the delivery")

    asyncio.run(run())


def test_a_slow_plain_answer_keeps_its_native_status(tmp_path: Path) -> None:
    async def run() -> None:
        async with serve(tmp_path / "j", outage_s=0.4) as (engine, _, url), httpx.AsyncClient() as http:
            engine.script += [Scripted(status=503, delay_s=0.2) for _ in range(5)]
            reply = await http.post(f"{url}/chat/completions", json={"messages": MESSAGES}, headers=HEADERS)
            assert reply.status_code == 503

    asyncio.run(run())


def test_an_error_after_the_headers_is_an_error_for_the_sdk(tmp_path: Path) -> None:
    async def run() -> None:
        async with serve(tmp_path / "j", outage_s=0.4) as (engine, session, url):
            engine.script += [Scripted(status=503, delay_s=0.2) for _ in range(5)]
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
            stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)  # type: ignore
            with pytest.raises(openai.APIError, match="did not answer"):
                async for _ in stream:
                    pass
            assert session.tree.nodes == [] and session.started == 0

    asyncio.run(run())


def test_a_client_that_leaves_a_started_stream_aborts(tmp_path: Path) -> None:
    async def run() -> None:
        async with serve(tmp_path / "j") as (engine, session, url), httpx.AsyncClient() as http:
            engine.script.append(Scripted("never", delay_s=20))
            body = {"messages": MESSAGES, "stream": True}
            async with http.stream("POST", f"{url}/chat/completions", json=body, headers=HEADERS) as reply:
                assert reply.status_code == 200
            await eventually(lambda: engine.aborted == 1, "the abort")
            await eventually(lambda: session.counters["aborted"] == 1, "the count")

    asyncio.run(run())

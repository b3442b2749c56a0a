"""What a streaming client hears while the answer takes long; in this process, so that the waits can be short."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import httpx
import openai
import pytest
from logged import ours
from proxy_helpers import eventually, serve_session
from websockets.asyncio.client import connect

from pipeline.capture import delivery
from pipeline.capture.dialects.chat import Chat
from pipeline.capture.upgrade import Socket
from pipeline.engine.scripted import Scripted

MESSAGES = [{"role": "user", "content": "x"}]
HEADERS = {"authorization": "Bearer k"}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "HEADERS_AFTER_S", 0.15)
    monkeypatch.setattr(delivery, "PING_EVERY_S", 0.1)


def test_a_slow_stream_is_kept_alive_and_ends_well(tmp_path: Path) -> None:
    async def run() -> None:
        async with serve_session(tmp_path / "j") as (engine, session, url), httpx.AsyncClient() as http:
            engine.script.append(Scripted("at last", delay_s=0.5))
            body = {"messages": MESSAGES, "stream": True}
            reply = await http.post(f"{url}/chat/completions", json=body, headers=HEADERS)
            assert reply.text.startswith(": ping\n\n: ping\n\n") and reply.text.endswith("data: [DONE]\n\n")
            assert "at last" in reply.text
            await eventually(lambda: session.tree.nodes[0].delivered, "the delivery")

    asyncio.run(run())


def test_a_slow_plain_answer_keeps_its_native_status(tmp_path: Path) -> None:
    async def run() -> None:
        async with serve_session(tmp_path / "j", outage_s=0.4) as (engine, _, url), httpx.AsyncClient() as http:
            engine.script += [Scripted(status=503, delay_s=0.2) for _ in range(5)]
            reply = await http.post(f"{url}/chat/completions", json={"messages": MESSAGES}, headers=HEADERS)
            assert reply.status_code == 503

    asyncio.run(run())


def test_an_error_after_the_headers_is_an_error_for_the_sdk(tmp_path: Path) -> None:
    async def run() -> None:
        async with serve_session(tmp_path / "j", outage_s=0.4) as (engine, session, url):
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
        async with serve_session(tmp_path / "j") as (engine, session, url), httpx.AsyncClient() as http:
            engine.script.append(Scripted("never", delay_s=20))
            body = {"messages": MESSAGES, "stream": True}
            async with http.stream("POST", f"{url}/chat/completions", json=body, headers=HEADERS) as reply:
                assert reply.status_code == 200
                await eventually(lambda: engine.running, "the call")
            await eventually(lambda: engine.aborted == 1, "the abort")
            await eventually(lambda: session.counters["aborted"] == 1, "the count")

    asyncio.run(run())


def test_a_dialect_without_pings_gets_headers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chat, "ping", b"")

    async def run() -> None:
        async with serve_session(tmp_path / "j") as (engine, _, url), httpx.AsyncClient() as http:
            engine.script.append(Scripted("at last", delay_s=0.6))
            body = {"messages": MESSAGES, "stream": True}
            began = time.monotonic()
            async with http.stream("POST", f"{url}/chat/completions", json=body, headers=HEADERS) as reply:
                assert reply.status_code == 200 and time.monotonic() - began < 0.5, "the headers do not wait"
                text = "".join([part async for part in reply.aiter_text()])
            assert text.startswith("data: ") and "at last" in text and text.endswith("data: [DONE]\n\n")

    asyncio.run(run())


def test_an_answer_at_the_very_moment_of_the_headers_is_whole(tmp_path: Path) -> None:
    """The answer races with the timer that begins the stream: whoever wins, the reply is one well-formed stream."""

    async def run() -> None:
        async with serve_session(tmp_path / "j") as (engine, session, url), httpx.AsyncClient() as http:
            for step in range(8):
                engine.script.append(Scripted("there", delay_s=0.13 + step * 0.004))
                body = {"messages": [*MESSAGES, {"role": "user", "content": str(step)}], "stream": True}
                reply = await http.post(f"{url}/chat/completions", json=body, headers=HEADERS)
                assert reply.status_code == 200 and reply.text.count("[DONE]") == 1 and "there" in reply.text
            await eventually(lambda: all(node.delivered for node in session.tree.nodes), "the deliveries")

    asyncio.run(run())


def test_an_error_in_a_begun_json_array_is_its_only_item(tmp_path: Path) -> None:
    async def run() -> None:
        async with serve_session(tmp_path / "j", outage_s=0.4) as (engine, _, url), httpx.AsyncClient() as http:
            engine.script += [Scripted(status=503, delay_s=0.2) for _ in range(5)]
            body = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
            path = "/v1beta/models/m:streamGenerateContent"
            async with http.stream("POST", url + path, json=body, headers=HEADERS) as reply:
                assert reply.status_code == 200
                (item,) = json.loads("".join([part async for part in reply.aiter_text()]))
            assert item["error"]["status"] == "UNAVAILABLE"

    asyncio.run(run())


def test_a_websocket_is_pinged_while_the_answer_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And hears nothing else before it; what Codex says of a sub-agent in the request is kept."""

    async def run() -> None:
        pongs: list[object] = []
        monkeypatch.setattr(Socket, "handle_pong", lambda self, frame: pongs.append(frame))
        monkeypatch.delattr(delivery.Delivery, "_keep_alive")  # who would begin a stream of events fails
        async with serve_session(tmp_path / "j") as (engine, session, url):
            engine.script.append(Scripted("at last", delay_s=0.5))
            async with connect(url.replace("http", "ws") + "/v1/responses", additional_headers=HEADERS) as client:
                metadata = {"x-openai-subagent": "review", "odd": 5}
                await client.send(json.dumps({"type": "response.create", "input": "x", "client_metadata": metadata}))
                assert json.loads(await client.recv())["type"] == "response.created"
                assert pongs
                await eventually(lambda: session.tree.nodes[0].delivered, "the delivery")
            assert session.tree.nodes[0].agent == "review"
            assert not ours(caplog)

    asyncio.run(run())

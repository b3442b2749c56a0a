"""The Responses API over WebSocket: the official client, and frames that it would not send."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import uvloop
from logged import ours
from proxy_helpers import Proxies, eventually, serve_session
from raw_http import connected, head, request
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from pipeline.capture import websocket
from pipeline.capture.app import SessionApp
from pipeline.capture.dialects.base import ApiError, Fault
from pipeline.capture.exchange import BODY_CAP, Exchange
from pipeline.capture.rows import rows
from pipeline.capture.session import Session
from pipeline.capture.upgrade import WAITING
from pipeline.capture.websocket import Frames
from pipeline.engine.scripted import WINDOW, FakeEngine, Scripted, call_text, render

BASH = {"type": "function", "name": "bash", "parameters": {"type": "object"}, "strict": False}
UPGRADE = (
    "connection: Upgrade",
    "upgrade: websocket",
    "sec-websocket-version: 13",
    "sec-websocket-key: eW9rZSB5b2tlIHlva2UuLg==",
)
END = ("response.completed", "response.incomplete", "error")
KEY = "authorization: Bearer k"
EMPTY, CLOSE = b"\x81\x80mask", b"\x88\x80mask"  # frames


@dataclass
class Served:
    """One session in this process, on the loop that shards run."""

    engine: FakeEngine
    session: Session
    port: int

    def opened(self, path: str = "/v1/responses", key: str = "k") -> connect:
        return opened(self.port, path, key)


@contextlib.asynccontextmanager
async def served(directory: Path, **options: Any) -> AsyncIterator[Served]:
    async with serve_session(directory / "j", **options) as (engine, session, url):
        yield Served(engine, session, int(url.rsplit(":", 1)[1]))


def opened(port: int, path: str = "/v1/responses", key: str = "k") -> connect:
    headers = {"authorization": f"Bearer {key}"}
    return connect(f"ws://127.0.0.1:{port}{path}", additional_headers=headers, max_size=None, ping_interval=None)


async def tell(socket: ClientConnection, **fields: Any) -> None:
    await socket.send(json.dumps({"type": "response.create", "model": "m"} | fields))


async def told(socket: ClientConnection) -> list[dict[str, Any]]:
    """The events up to the end of an answer."""
    events: list[dict[str, Any]] = []
    async with asyncio.timeout(10):
        while not events or events[-1]["type"] not in END:
            events.append(json.loads(await socket.recv()))
    return events


async def said(socket: ClientConnection) -> str:
    """The text of an answer."""
    return str((await told(socket))[-1]["response"]["output"][0]["content"][0]["text"])


async def turned_down(socket: ClientConnection, **fields: Any) -> dict[str, Any]:
    """The frame that refuses a request."""
    await tell(socket, **fields)
    [frame] = await told(socket)
    return frame


def test_the_official_client_sends_only_what_is_new(proxies: Proxies) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k") as harness:
            proxy.engine.script += [Scripted("I look. " + call_text("bash", {"c": "ls"})), Scripted("done")]
            client = openai.AsyncOpenAI(base_url=f"{harness.http.base_url}/v1", api_key="k")
            async with client.responses.connect() as connection:
                await connection.response.create(model="m", input="hello", tools=[BASH])  # type: ignore[list-item]
                events = [await connection.recv()]
                while events[-1].type != "response.completed":
                    events.append(await connection.recv())
                assert events[0].type == "response.created"
                assert [event.sequence_number for event in events] == list(range(len(events)))  # type: ignore
                first = events[-1].response
                result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "a b"}  # type: ignore
                await connection.response.create(
                    model="m", input=[result], tools=[BASH], previous_response_id=first.id  # type: ignore[list-item]
                )  # fmt: skip
                while (event := await connection.recv()).type != "response.completed":
                    pass
                assert event.response.previous_response_id == first.id
                assert event.response.output_text == "done"
            trace = await proxy.supervisor.close_session("k")
        assert [call.parent for call in trace.calls] == [None, 0]
        assert all(call.delivered for call in trace.calls) and trace.dialect == "responses"
        [row] = rows(trace)
        assert row.trained_tokens == sum(len(call.sampled_ids) for call in trace.calls)

    asyncio.run(run())


def test_a_continued_conversation_is_the_one_that_is_sent_whole(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as here, here.opened("/responses") as socket:
            here.engine.script += [Scripted("<think>hm</think>one"), Scripted("two"), Scripted("two")]
            await tell(socket, input="a", instructions="Be brief.")
            first = (await told(socket))[-1]["response"]
            await tell(socket, input="b", instructions="Be brief.", previous_response_id=first["id"])
            assert await said(socket) == "two"
            whole = [{"role": "user", "content": "a"}, *first["output"], {"role": "user", "content": "b"}]
            body = json.dumps({"model": "m", "input": whole, "instructions": "Be brief."}).encode()
            async with connected(here.port) as wire:
                await wire.send(request("/v1/responses", body, key=KEY))
                assert (await wire.reply()).status == 200
            tree = here.session.tree
            assert tree.prompt(1) == tree.prompt(2) and tree.nodes[1].parent == tree.nodes[2].parent
            assert all(node.delivered and node.dialect == "responses" for node in tree.nodes)

    uvloop.run(run())


BAD_MESSAGES = ("", "{", "[]", "{}", '{"type": 7}', '{"type": "response.cancel", "input": "x"}', b"{}", b"\xff")
BAD_FIELDS = ({"input": 5}, {"input": []}, {"input": "x", "background": True}, {"input": "x", "generate": 1})


def test_what_is_no_request_is_an_error_and_the_connection_stays(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as here, here.opened() as socket:
            for message in BAD_MESSAGES:
                await socket.send(message)
                [frame] = await told(socket)
                assert (message, frame["type"], frame["status"]) == (message, "error", 400)
                assert set(frame["error"]) == {"message", "type", "param", "code"}
            assert "binary" in frame["error"]["message"]
            for fields in BAD_FIELDS:
                assert (await turned_down(socket, **fields))["status"] == 400
            unknown = await turned_down(socket, input="x", previous_response_id="resp_1")
            assert unknown["error"]["code"] == "previous_response_not_found" and unknown["status"] == 400
            assert unknown["error"]["param"] == "previous_response_id"
            assert here.engine.generated == []
            await tell(socket, input="x", stream=True, background=False)
            assert await said(socket) == "ok"

    uvloop.run(run())


OPENAI = {"message", "type", "param", "code"}
REFUSED = (
    ("/v1/responses", "wrong", 401, OPENAI),
    ("/v1/nowhere", "k", 404, OPENAI),
    ("/v1/chat/completions", "k", 405, OPENAI),
    ("/v1/messages", "k", 405, {"message", "type"}),
)


def test_upgrades_are_refused_with_the_status_of_a_request(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as here:
            for path, key, status, shape in REFUSED:
                with pytest.raises(InvalidStatus) as refused:
                    async with here.opened(path, key):
                        pass
                response = refused.value.response
                assert (path, response.status_code) == (path, status)
                assert set(json.loads(response.body or b"")["error"]) == shape

    uvloop.run(run())


def test_each_request_has_to_find_its_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: SessionApp, key: str, exchange: Exchange) -> Session:
        raise ApiError(Fault.UNAUTHORIZED, f"no {key}")

    async def run() -> None:
        async with served(tmp_path) as here, here.opened() as socket:
            await tell(socket, input="x")
            assert await said(socket) == "ok"
            monkeypatch.setattr(SessionApp, "find", gone)
            frame = await turned_down(socket, input="x")
            assert frame["status"] == 401 and frame["error"]["message"] == "no k"

    uvloop.run(run())


ODD_UPGRADES = (((), 405), (UPGRADE[:2], 400), ((*UPGRADE, "x-long: " + "x" * 20_000), 431))


def test_odd_upgrades_break_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as here:
            for lines, status in ODD_UPGRADES:
                async with connected(here.port) as wire:
                    await wire.send(head("/v1/responses", KEY, *lines, method="GET"))
                    assert (len(lines), (await wire.reply()).status) == (len(lines), status)
            posted = request("/v1/responses", b'{"model": "m", "input": "x"}', key=KEY)
            async with connected(here.port) as wire:
                here.engine.script.append(Scripted("late", delay_s=0.1))
                await wire.send(posted + head("/v1/responses", KEY, *UPGRADE, method="GET"))
                replies = [await wire.reply(), await wire.reply()]
                assert [reply.status for reply in replies] == [200, 405]  # no upgrade while an answer is due
            async with connected(here.port) as wire:
                await wire.send(head("/", *UPGRADE, method="HEAD"))
                assert (await wire.reply("HEAD")).status == 200
                await wire.send(posted)
                assert (await wire.reply()).status == 200
                await wire.send(head("/v1/responses", KEY, *UPGRADE, method="GET"))
                assert (await wire.reply("HEAD")).status == 101

    uvloop.run(run())


def test_no_upgrade_cuts_an_answer_that_is_on_its_way(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path, send_buffer=4096, max_tokens=10**6) as here, connected(here.port) as wire:
            here.engine.script.append(Scripted("a" * 150_000))
            wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await wire.send(request("/v1/responses", b'{"model": "m", "input": "x", "stream": true}', key=KEY))
            await eventually(lambda: here.session.tree.nodes, "the answer")
            await asyncio.sleep(0.1)
            await wire.send(head("/v1/responses", KEY, *UPGRADE, method="GET"))
            await asyncio.sleep(0.1)
            wire.writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert [(await wire.reply()).status, (await wire.reply()).status] == [200, 405]
            await eventually(lambda: here.session.tree.nodes[0].delivered, "the delivery")

    uvloop.run(run())


def test_a_warm_up_makes_no_call_and_can_be_continued(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as here, here.opened() as socket:
            await tell(socket, generate=False, tools=[BASH])
            created, completed = await told(socket)
            assert created["type"] == "response.created" and completed["response"]["output"] == []
            assert completed["response"]["usage"]["total_tokens"] == 0
            await tell(socket, generate=False, input="hello", previous_response_id=completed["response"]["id"])
            [*_, completed] = await told(socket)
            assert here.engine.generated == []
            await tell(socket, input=[], previous_response_id=completed["response"]["id"])
            assert await said(socket) == "ok"
            [sample] = here.engine.samples
            assert sample.prompt == render([{"role": "user", "content": "hello"}])

    uvloop.run(run())


def test_lanes_are_told_apart_and_each_remembers(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as here, here.opened() as socket:
            last = {}
            for lane in ("a", "b"):
                await tell(socket, input=f"in {lane}", stream_id=lane)
                events = await told(socket)
                assert {event["stream_id"] for event in events} == {lane}
                last[lane] = events[-1]["response"]["id"]
            for lane in ("a", "b"):
                await tell(socket, input="more", stream_id=lane, previous_response_id=last[lane])
                await told(socket)
            stale = await turned_down(socket, input="more", stream_id="a", previous_response_id=last["a"])
            assert stale["stream_id"] == "a" and stale["error"]["code"] == "previous_response_not_found"
            assert [node.parent for node in here.session.tree.nodes] == [None, None, 0, 1]

    uvloop.run(run())


def test_all_lanes_together_remember_no_more_than_the_cap(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as here, here.opened() as socket:
            known = {}
            for lane in "abc":
                note = {"role": "user", "content": "x" * (BODY_CAP // 5 * 2)}
                await tell(socket, input=[note], generate=False, stream_id=lane)
                known[lane] = (await told(socket))[-1]["response"]["id"]
            lost = await turned_down(socket, stream_id="a", generate=False, previous_response_id=known["a"])
            assert lost["error"]["code"] == "previous_response_not_found"
            for lane in "bc":
                await tell(socket, stream_id=lane, generate=False, previous_response_id=known[lane])
                assert (await told(socket))[-1]["type"] == "response.completed"

    uvloop.run(run())


def test_requests_wait_for_each_other_and_a_leave_behind_them_is_seen(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as here:
            async with here.opened() as socket:
                here.engine.script += [Scripted("one", delay_s=0.2), Scripted("two")]
                await tell(socket, input="a")
                await tell(socket, input="b")
                assert [await said(socket), await said(socket)] == ["one", "two"]
                here.engine.script.append(Scripted("never", delay_s=20))
                await tell(socket, input="c")
                await tell(socket, input="d")
                await eventually(lambda: here.engine.running == 1, "the call")
            await eventually(lambda: here.engine.aborted == 1 and not here.engine.running, "the abort")
            await eventually(lambda: here.session.counters["aborted"] == 1, "the count")
            assert len(here.session.tree.nodes) == 2 and not here.session.turns

    uvloop.run(run())


def test_who_sends_more_than_may_wait_is_dropped_and_the_call_ends(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as here, here.opened() as socket:
            here.engine.script.append(Scripted("never", delay_s=20))
            await tell(socket, input="x")
            await eventually(lambda: here.engine.running == 1, "the call")
            for _ in range(WAITING + 1):
                await tell(socket, input="y")
            with pytest.raises(ConnectionClosed) as closed:
                await socket.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
            await eventually(lambda: here.session.counters["aborted"] == 1, "the abort")
            assert not here.session.tree.nodes and not here.session.turns

    uvloop.run(run())


def test_messages_that_arrive_together_let_others_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        turns, seen = itertools.count(), []

        async def other() -> None:
            while True:
                next(turns)
                await asyncio.sleep(0)

        fail = Frames.fail

        async def refused(self: Frames, *said: Any) -> None:
            seen.append(next(turns))
            await fail(self, *said)

        monkeypatch.setattr(Frames, "fail", refused)
        async with served(tmp_path) as here, connected(here.port) as wire:
            await wire.send(head("/v1/responses", KEY, *UPGRADE, method="GET"))
            assert (await wire.reply("HEAD")).status == 101
            busy = asyncio.create_task(other())
            await wire.send(EMPTY * WAITING)
            await eventually(lambda: len(seen) == WAITING, "the answers")
            busy.cancel()
        assert all(later > earlier + 1 for earlier, later in itertools.pairwise(seen))

    uvloop.run(run())


def test_a_connection_that_keeps_still_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with served(tmp_path) as here, here.opened() as socket:
            here.engine.script.append(Scripted("longer than that", delay_s=0.5))
            await tell(socket, input="x")
            assert await said(socket) == "longer than that"
            with pytest.raises(ConnectionClosed) as closed:
                await socket.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001

    monkeypatch.setattr(websocket, "KEEP_ALIVE_S", 0.2)
    uvloop.run(run())


def test_a_dead_shard_is_one_dropped_connection(proxies: Proxies) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k") as harness:
            port = harness.http.base_url.port or 0
            proxy.engine.script += [Scripted("one"), Scripted("never", delay_s=20), Scripted("two")]
            async with opened(port) as socket:
                await tell(socket, input="a")
                first = (await told(socket))[-1]["response"]
                await tell(socket, input="b", previous_response_id=first["id"])
                await eventually(lambda: proxy.engine.running == 1, "the call")
                os.kill(proxy.pids()[0], signal.SIGKILL)
                with pytest.raises(ConnectionClosed):
                    await socket.recv()
            async with opened(port) as socket:
                lost = await turned_down(socket, input="b", previous_response_id=first["id"])
                assert lost["error"]["code"] == "previous_response_not_found"
                user = [{"role": "user", "content": text} for text in "ab"]
                await tell(socket, input=[user[0], *first["output"], user[1]])
                assert await said(socket) == "two"
            trace = await proxy.supervisor.close_session("k")
        assert [(call.parent, call.delivered) for call in trace.calls] == [(None, True), (0, True)]

    asyncio.run(run())


def test_a_drain_lets_the_call_end_and_takes_no_other(proxies: Proxies) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k") as harness:
            async with opened(harness.http.base_url.port or 0) as socket:
                proxy.engine.script.append(Scripted("late", delay_s=0.5))
                await tell(socket, input="a")
                await eventually(lambda: proxy.engine.running == 1, "the call")
                await proxy.supervisor.drain()
                await tell(socket, input="b")
                assert await said(socket) == "late"
                [frame] = await told(socket)
                assert frame["status"] == 503 and frame["headers"] == {"retry-after": "5"}

    asyncio.run(run())


def test_calls_at_once_are_limited_over_all_connections(proxies: Proxies) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k", max_concurrent=1) as harness:
            port = harness.http.base_url.port or 0
            async with opened(port) as socket, opened(port) as other:
                proxy.engine.script.append(Scripted("slow", delay_s=1))
                await tell(socket, input="a")
                await eventually(lambda: proxy.engine.running == 1, "the call")
                frame = await turned_down(other, input="b")
                assert frame["status"] == 429 and frame["headers"] == {"retry-after": "1"}
                assert (await harness.ask([{"role": "user", "content": "c"}])).status_code == 429
                assert await said(socket) == "slow"
                await tell(other, input="b")
                assert await said(other) == "ok"

    asyncio.run(run())


def test_an_answer_that_was_not_read_is_given_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path, send_buffer=4096, max_tokens=10**6) as here:
            here.engine.script += [Scripted("a" * 150_000), Scripted("another")]
            async with here.opened() as socket:
                socket.transport.pause_reading()
                await tell(socket, input="x")
                await eventually(lambda: here.session.tree.nodes, "the answer")
                await asyncio.sleep(0.1)
                assert not here.session.tree.nodes[0].delivered
                socket.transport.abort()
            async with here.opened() as socket:
                await tell(socket, input="x")
                assert await said(socket) == "a" * 150_000
            [node] = here.session.tree.nodes
            await eventually(lambda: node.delivered, "the delivery")
            assert here.session.counters["redelivered"] == 1

    uvloop.run(run())


def test_a_leave_at_the_last_moment_is_no_delivery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with served(tmp_path) as here:
            async with here.opened() as socket:
                with monkeypatch.context() as patch:
                    patch.setattr(Frames, "_write", leaves_first)
                    await tell(socket, input="x")
                    with pytest.raises(ConnectionClosed):
                        await socket.recv()
                await eventually(lambda: not here.session.turns, "the end of the turn")
            [node] = here.session.tree.nodes
            assert not node.delivered
            async with here.opened() as socket:
                await tell(socket, input="x")
                assert await said(socket) == "ok" and here.session.counters["redelivered"] == 1
            await eventually(lambda: node.delivered, "the delivery")
            assert not ours(caplog)

    write = Frames._write

    async def leaves_first(self: Frames, texts: list[bytes]) -> None:
        self._socket.data_received(CLOSE)
        await write(self, texts)

    uvloop.run(run())


def test_errors_of_a_turn_carry_status_and_wait(proxies: Proxies) -> None:
    """And the end of the session is the end of the connection."""

    async def run() -> None:
        async with proxies.run(outage_s=0.3) as proxy, proxy.session("k", max_calls=1) as harness:
            async with opened(harness.http.base_url.port or 0) as socket:
                proxy.engine.script += [Scripted(status=503) for _ in range(20)]
                frame = await turned_down(socket, input="x")
                assert frame["status"] == 503 and int(frame["headers"]["retry-after"]) > 0
                proxy.engine.script.clear()
                full = await turned_down(socket, input="x" * WINDOW)
                assert full["error"]["code"] == "context_length_exceeded"
                for _ in range(4):  # one call, then the last words
                    await tell(socket, input="x")
                    await said(socket)
                assert (await turned_down(socket, input="x"))["status"] == 400
                await proxy.supervisor.close_session("k")
                with pytest.raises(ConnectionClosed):
                    await socket.recv()
        assert len(proxy.engine.samples) == 1

    asyncio.run(run())


def test_a_message_beyond_the_cap_ends_the_connection(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as here:
            async with here.opened() as socket:
                with pytest.raises(ConnectionClosed) as closed:
                    await socket.send(b" " * (BODY_CAP + 1))
                    await socket.recv()
                assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009
            async with here.opened() as socket:
                note = {"role": "user", "content": "x" * (BODY_CAP // 2)}
                await tell(socket, input=[note], generate=False)
                known = (await told(socket))[-1]["response"]["id"]
                last = await turned_down(socket, input=[note], generate=False, previous_response_id=known)
                assert last["status"] == 413

    uvloop.run(run())

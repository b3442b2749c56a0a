"""Requests that no client library would send, and clients that leave at the worst moment."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import zstandard
from proxy_helpers import Proxies, Proxy, deaf_client, eventually
from raw_http import DIALECTS, KEY, KEY_PLACES, TEXT, Wire, chunked, connected, head, request

from pipeline.capture.rows import rows
from pipeline.engine.scripted import Scripted, decoded, render

every_dialect = pytest.mark.parametrize("dialect", DIALECTS)
BODY_CAP = 64 * 2**20


@dataclass
class Raw:
    """A running proxy with one session, and its port."""

    proxy: Proxy
    port: int

    async def fine(self, wire: Wire, dialect: str = "chat") -> None:
        """The connection and the session still work."""
        await wire.send(request(DIALECTS[dialect].path, encoded(dialect)))
        reply = await wire.reply()
        assert reply.status == 200, reply.body


@contextlib.asynccontextmanager
async def served(proxies: Proxies, **options: object) -> AsyncIterator[Raw]:
    policy = {"max_tokens": 10**5, "max_calls": 1000} | options
    async with proxies.run() as proxy, proxy.session(KEY, **policy) as harness:
        yield Raw(proxy, harness.http.base_url.port or 0)


def encoded(dialect: str, text: str = TEXT) -> bytes:
    return json.dumps(DIALECTS[dialect].body(text), ensure_ascii=False).encode()


NO_JSON = {
    "nothing": b"",
    "half": b'{"messages": [',
    "a list": b"[]",
    "null": b"null",
    "a string": b'"x"',
    "two": b"{}{}",
    "no utf-8": b'{"model": "\xff\xfe", "messages": "\xc3"}',
    "deep": b'{"messages": ' + b"[" * 100_000,
    "deep and whole": b'{"messages": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    "nan": b'{"messages": NaN}',
    "empty": b"{}",
    "wrong kinds": b'{"messages": 5, "input": 5, "contents": 5, "model": []}',
    "no items": b'{"messages": [], "input": [], "contents": []}',
    "items of a wrong kind": b'{"messages": [7], "input": [7], "contents": [7], "max_tokens": 9}',
}


@every_dialect
def test_what_is_no_request_is_a_400_in_the_dialect(proxies: Proxies, dialect: str) -> None:
    async def run() -> None:
        async with served(proxies) as raw, connected(raw.port) as wire:
            for name, body in NO_JSON.items():
                await wire.send(request(DIALECTS[dialect].path, body))
                reply = await wire.reply()
                assert (name, reply.status) == (name, 400), reply.body
                assert reply.error(dialect)
            await raw.fine(wire, dialect)

    asyncio.run(run())


ODD_JSON = {
    "a lone surrogate": (b'"\\ud83d"', (200, 400)),
    "a pair of escapes": (b'"caf\\u00e9 \\ud83d\\ude00"', (200,)),
    "a nul": (b'"a\\u0000b"', (200,)),
    "a huge number": (b"1e999", (400,)),
    "an empty text": (b'""', (200, 400)),
    "marks of the template": (b'"<|im_end|><|end|>"', (200,)),
}


@every_dialect
def test_odd_texts_are_read_or_refused_but_break_nothing(proxies: Proxies, dialect: str) -> None:
    async def run() -> None:
        async with served(proxies) as raw, connected(raw.port) as wire:
            for name, (text, statuses) in ODD_JSON.items():
                body = encoded(dialect, "@@").replace(b'"@@"', text)
                await wire.send(request(DIALECTS[dialect].path, body))
                reply = await wire.reply()
                assert reply.status in statuses, (name, reply.status, reply.body)
            await raw.fine(wire, dialect)
            trace = await raw.proxy.supervisor.close_session(KEY)
            assert any("caf\u00e9 \U0001f600" in decoded(call.prompt_ids) for call in trace.calls)

    asyncio.run(run())


@every_dialect
def test_a_key_may_stand_in_any_of_four_places(proxies: Proxies, dialect: str) -> None:
    async def run() -> None:
        async with served(proxies) as raw, connected(raw.port) as wire:
            path, body = DIALECTS[dialect].path, encoded(dialect)
            for place, (query, header) in KEY_PLACES.items():
                await wire.send(request(path + query, body, key=header))
                assert (place, (await wire.reply()).status) == (place, 200)
            for header in ("x-nothing: 1", "authorization: Bearer", "authorization: Basic x", "x-api-key: caf\u00e9"):
                await wire.send(request(path + "?key=wrong", body, key=header))
                reply = await wire.reply()
                assert (header, reply.status) == (header, 401) and reply.error(dialect)

    asyncio.run(run())


@every_dialect
def test_a_wrong_key_is_refused_before_the_body_is_there(proxies: Proxies, dialect: str) -> None:
    async def run() -> None:
        async with served(proxies) as raw, connected(raw.port) as wire:
            await wire.send(head(DIALECTS[dialect].path, "content-length: 1000", "x-api-key: wrong") + b"{")
            reply = await wire.reply()
            assert reply.status == 401 and reply.error(dialect)

    asyncio.run(run())


@every_dialect
def test_unknown_routes_and_methods_are_told_in_the_dialect(proxies: Proxies, dialect: str) -> None:
    async def run() -> None:
        async with served(proxies) as raw, connected(raw.port) as wire:
            await wire.send(request(DIALECTS[dialect].other, b"{}"))
            reply = await wire.reply()
            assert reply.status == 404 and DIALECTS[dialect].other in reply.error(dialect)
            for method in ("GET", "PUT", "DELETE", "PATCH"):
                await wire.send(request(DIALECTS[dialect].path, b"", method=method))
                reply = await wire.reply()
                assert (method, reply.status) == (method, 405) and reply.error(dialect)
            await raw.fine(wire, dialect)

    asyncio.run(run())


def test_greetings_need_no_key_and_v1_may_be_left_out(proxies: Proxies) -> None:
    async def run() -> None:
        async with served(proxies) as raw, connected(raw.port) as wire:
            for method, path in (("HEAD", "/"), ("HEAD", "/api/hello"), ("GET", "/api/hello")):
                await wire.send(head(path, method=method))
                assert (path, (await wire.reply(method)).status) == (path, 200)
            for dialect in ("chat", "responses", "anthropic"):
                path = DIALECTS[dialect].path.removeprefix("/v1")
                await wire.send(request(path, encoded(dialect)))
                assert (path, (await wire.reply()).status) == (path, 200)

    asyncio.run(run())


@pytest.mark.parametrize("model", ["m", "maker/model-1", "a/b/c.d:e", "maker%2Fmodel-1", "caf%C3%A9"])
def test_geminis_path_takes_any_model_name(proxies: Proxies, model: str) -> None:
    async def run() -> None:
        async with served(proxies) as raw, connected(raw.port) as wire:
            for version in ("/v1beta", "/v1"):
                await wire.send(request(f"{version}/models/{model}:generateContent", encoded("gemini")))
                assert (await wire.reply()).status == 200
                await wire.send(request(f"{version}/models/{model}:streamGenerateContent?alt=sse", encoded("gemini")))
                reply = await wire.reply()
                assert reply.headers["content-type"] == "text/event-stream" and b"data: " in reply.body
                await wire.send(request(f"{version}/models/{model}:countTokens", encoded("gemini")))
                assert (await wire.reply()).json["totalTokens"] > 0

    asyncio.run(run())


def packed(data: bytes) -> dict[str, bytes]:
    return {"gzip": gzip.compress(data), "deflate": zlib.compress(data), "zstd": zstandard.compress(data)}


def test_compressed_bodies_whole_broken_and_swollen(proxies: Proxies) -> None:
    async def run() -> None:
        async with served(proxies) as raw, connected(raw.port) as wire:
            path = DIALECTS["chat"].path
            wrong = {name: data[: len(data) // 2] for name, data in packed(encoded("chat")).items()}
            noise = {name: b"no such thing" for name in wrong}
            bombs = packed(b'{"messages": "' + b" " * BODY_CAP)
            cases = ((packed(encoded("chat")), 200), (wrong, 400), (noise, 400), (bombs, 413), (packed(b""), 400))
            for bodies, status in cases:
                for encoding, data in bodies.items():
                    await wire.send(request(path, data, f"content-encoding: {encoding}"))
                    reply = await wire.reply()
                    assert (encoding, reply.status) == (encoding, status), reply.body
            for encoding in ("br", "gzip, gzip", "nonsense"):
                await wire.send(request(path, b"x", f"content-encoding: {encoding}"))
                assert (await wire.reply()).status == 400
            await raw.fine(wire)

    asyncio.run(run())


@every_dialect
def test_fifty_megabytes_are_taken_and_more_than_the_cap_is_not(proxies: Proxies, dialect: str) -> None:
    """A body of the greatest size is read and forgotten; the context it would need is the engine's to refuse."""

    async def run() -> None:
        async with served(proxies) as raw:
            path = DIALECTS[dialect].path
            large = json.dumps(DIALECTS[dialect].body() | {"metadata": {"note": "x" * (50 * 2**20)}}).encode()
            async with connected(raw.port) as wire:
                await wire.send(request(path, large))
                assert (await wire.reply()).status == 200
            async with connected(raw.port) as wire:
                await wire.send(head(path, f"content-length: {BODY_CAP + 1}", KEY_PLACES["bearer"][1]))
                reply = await wire.reply()
                assert reply.status == 413 and reply.error(dialect)
            async with connected(raw.port) as wire:
                await raw.fine(wire, dialect)

    asyncio.run(run())


def test_the_cap_holds_where_no_length_is_told(proxies: Proxies) -> None:
    async def run() -> None:
        async with served(proxies) as raw:
            async with connected(raw.port) as wire:
                with contextlib.suppress(ConnectionError):
                    await wire.send(head(DIALECTS["chat"].path, "transfer-encoding: chunked", KEY_PLACES["bearer"][1]))
                    await wire.send(*chunked(b" " * (BODY_CAP + 2**20), 2**20))
                assert (await wire.reply()).status == 413
            async with connected(raw.port) as wire:
                await raw.fine(wire)

    asyncio.run(run())


def test_a_body_arrives_as_it_likes(proxies: Proxies) -> None:
    """Byte by byte, so that characters are torn; in chunks; after a "go on"; several requests at once."""

    async def run() -> None:
        async with served(proxies) as raw, connected(raw.port) as wire:
            body, path = encoded("chat"), DIALECTS["chat"].path
            whole = request(path, body)
            await wire.send(*[whole[i : i + 1] for i in range(len(whole))], pause_s=0.0005)
            assert (await wire.reply()).status == 200
            key = KEY_PLACES["bearer"][1]
            await wire.send(head(path, "transfer-encoding: chunked", key), *chunked(body, 3))
            assert (await wire.reply()).status == 200
            await wire.send(head(path, "expect: 100-continue", f"content-length: {len(body)}", key))
            assert (await wire.reply()).status == 100
            await wire.send(body)
            assert (await wire.reply()).status == 200
            for word in ("one", "two", "three"):
                raw.proxy.engine.script.append(Scripted(word, delay_s=0.1))
            await wire.send(request(path, encoded("chat", "1")) + request(path, encoded("chat", "2")) + whole)
            said = [(await wire.reply()).json["choices"][0]["message"]["content"] for _ in range(3)]
            assert said == ["one", "two", "three"]
            trace = await raw.proxy.supervisor.close_session(KEY)
            prompt = render([{"role": "user", "content": TEXT}])
            assert [call.prompt_ids.tolist() == prompt for call in trace.calls] == [True] * 3 + [False] * 2 + [True]
            assert all(call.delivered for call in trace.calls)

    asyncio.run(run())


@every_dialect
def test_a_client_may_leave_at_any_stage(proxies: Proxies, dialect: str) -> None:
    """In the head, in the body, while it waits (streaming or not): nothing is recorded, nothing goes on, all works."""

    async def run() -> None:
        async with served(proxies) as raw:
            path, body = DIALECTS[dialect].path, encoded(dialect)
            whole = request(path, body)
            for cut in (1, 20, len(whole) - len(body), len(whole) - 3):
                async with connected(raw.port) as wire:
                    await wire.send(whole[:cut], pause_s=0.02)
            assert raw.proxy.engine.generated == []
            streaming = json.dumps(DIALECTS[dialect].body() | {"stream": True}).encode()
            for data in (whole, request(path.replace(":gen", ":streamGen"), streaming)):
                raw.proxy.engine.script.append(Scripted("late", delay_s=20))
                async with connected(raw.port) as wire:
                    await wire.send(data)
                    await eventually(lambda: raw.proxy.engine.running == 1, "the call")
                await eventually(lambda: raw.proxy.engine.running == 0, "the abort")
            async with connected(raw.port) as wire:
                await raw.fine(wire, dialect)
            trace = await raw.proxy.supervisor.close_session(KEY)
            assert len(trace.calls) == 1 and trace.counters["aborted"] == 2

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_in_the_answer_gets_it_again(proxies: Proxies, stream: bool) -> None:
    """Headers and a part were read; the rest is still in the proxy."""

    async def run() -> None:
        async with served(proxies, send_buffer=4096) as raw:
            raw.proxy.engine.script += [Scripted("a" * 90_000), Scripted("another")]
            body = DIALECTS["chat"].body() | {"stream": stream, "max_tokens": 10**5}
            client = deaf_client(raw.port, body, KEY)
            await asyncio.to_thread(client.recv, 700)
            await asyncio.sleep(0.1)
            client.close()
            await asyncio.sleep(0.1)
            async with connected(raw.port) as wire:
                await wire.send(request(DIALECTS["chat"].path, json.dumps(body).encode()))
                assert (await wire.reply()).body.count(b"a" * 1000) >= 90
            assert len(raw.proxy.engine.generated) == 1
            trace = await raw.proxy.supervisor.close_session(KEY)
            assert [call.delivered for call in trace.calls] == [True] and trace.counters["redelivered"] == 1
            assert len(rows(trace)) == 1

    asyncio.run(run())


def test_half_sent_requests_hold_nobody_up(proxies: Proxies) -> None:
    async def run() -> None:
        async with served(proxies) as raw, contextlib.AsyncExitStack() as stack:
            whole = request(DIALECTS["chat"].path, encoded("chat"))
            waiting = [await stack.enter_async_context(connected(raw.port)) for _ in range(50)]
            for wire in waiting:
                await wire.send(whole[:-7])
            async with connected(raw.port) as wire:
                await raw.fine(wire)
            for wire in waiting:
                await wire.send(whole[-7:])
            assert [(await wire.reply()).status for wire in waiting] == [200] * 50

    asyncio.run(run())


def test_bodies_that_arrive_together_do_not_pass_the_limit_together(proxies: Proxies) -> None:
    async def run() -> None:
        async with served(proxies, max_concurrent=1) as raw, contextlib.AsyncExitStack() as stack:
            raw.proxy.engine.answers = lambda prompt: Scripted("slow", delay_s=0.5)
            wires = [await stack.enter_async_context(connected(raw.port)) for _ in range(3)]
            whole = request(DIALECTS["chat"].path, encoded("chat"))
            for wire in wires:
                await wire.send(whole[:-7], pause_s=0.02)
            for wire in wires:
                await wire.send(whole[-7:])
            assert sorted([(await wire.reply()).status for wire in wires]) == [200, 429, 429]

    asyncio.run(run())


def test_what_is_no_http_ends_the_connection_only(proxies: Proxies) -> None:
    async def run() -> None:
        async with served(proxies) as raw:
            for noise in (
                b"\x16\x03\x01\x02\x00\x01\x00",
                b"hello\r\n\r\n",
                b"GET /\x00 HTTP/9.9\r\n\r\n",
                b"\r\n" * 9,
            ):
                async with connected(raw.port) as wire:
                    await wire.send(noise, b"\r\n\r\n", pause_s=0.02)
            async with connected(raw.port) as wire:
                await raw.fine(wire)
                await wire.send(request(DIALECTS["chat"].path, b"", f"x-long: {'x' * 60_000}"))
                assert (await wire.reply()).status == 400

    asyncio.run(run())

"""The proxy's errors as the official SDKs raise them: by class, status, words and retry-after."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from proxy_helpers import Proxies, eventually
from sdk_clients import AnthropicSdk, ChatSdk, GeminiSdk, ResponsesSdk, Sdk

from pipeline.engine.scripted import WINDOW, Scripted

SDKS: list[type[Sdk]] = [ChatSdk, ResponsesSdk, AnthropicSdk, GeminiSdk]
every_sdk = pytest.mark.parametrize("sdk", SDKS)


def status_of(error: BaseException) -> int:
    """The HTTP status in an SDK's exception."""
    return int(getattr(error, "status_code", 0) or getattr(error, "code", 0))


async def raised(what: str, client: Sdk, status: int, **wishes: Any) -> Any:
    """The exception of a turn, checked by class and status."""
    client.history or client.say("hello")
    with pytest.raises(client.errors[what]) as caught:
        await client.turn(**wishes)
    assert status_of(caught.value) == status, caught.value
    return caught.value


@every_sdk
def test_refusals_are_typed(proxies: Proxies, sdk: type[Sdk]) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k") as harness:
            client = sdk(harness)
            client.say("x" * WINDOW)
            for stream in (False, True):
                full = await raised("request", client, 400, stream=stream)
                assert client.full_context in f"{full} {getattr(full, 'body', '')}"
            with pytest.raises(client.errors["route"]) as caught:
                await client.ask_elsewhere()
            assert status_of(caught.value) == 404
            harness.key = "wrong"
            assert "key" in str(await raised("key", sdk(harness), 401))
            assert proxy.engine.generated == []

    asyncio.run(run())


@pytest.mark.parametrize("sdk", [ChatSdk, AnthropicSdk])
def test_a_body_over_the_cap_is_413(proxies: Proxies, sdk: type[Sdk]) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k") as harness:
            client = sdk(harness)
            client.say("x" * (65 * 2**20))
            await raised("large", client, 413)
            client.history.clear()
            client.say("hello")
            assert (await client.turn()).text == "ok" and len(proxy.engine.generated) == 1

    asyncio.run(run())


@every_sdk
def test_what_lasts_in_the_engine_is_passed_on(proxies: Proxies, sdk: type[Sdk]) -> None:
    async def run() -> None:
        async with proxies.run(outage_s=0.3) as proxy, proxy.session("k") as harness:
            client = sdk(harness)
            overload = 529 if sdk is AnthropicSdk else 503
            for what, engine_status, status in (
                ("rate", 429, 429),
                ("overload", 503, overload),
                ("internal", 500, 500),
            ):
                proxy.engine.answers = lambda prompt, s=engine_status: Scripted(status=s, retry_after=7)
                error = await raised(what, client, status)
                assert what == "internal" or int(error.response.headers["retry-after"]) == 7
                assert type(await raised(what, client, status, stream=True)) is type(error)

    asyncio.run(run())


@every_sdk
def test_an_sdks_own_retry_gets_the_answer(proxies: Proxies, sdk: type[Sdk]) -> None:
    """Busy for longer than the proxy waits, then free: the SDK comes back after the time that it was told."""

    async def run() -> None:
        async with proxies.run(outage_s=0.3) as proxy, proxy.session("k") as harness:
            client = sdk(harness, retries=2)
            client.say("hello")
            await client.turn()
            client.say("again")
            busy = True
            proxy.engine.answers = lambda prompt: Scripted(status=429, retry_after=1) if busy else Scripted("free")
            waiting = asyncio.create_task(client.turn(stream=True))
            await eventually(lambda: len(proxy.engine.generated) >= 3, "the refused tries")
            await asyncio.sleep(0.3)
            busy = False
            assert (await waiting).text == "free"
            trace = await proxy.supervisor.close_session("k")
            assert [call.parent for call in trace.calls] == [None, 0]

    asyncio.run(run())


@every_sdk
def test_a_deadline_of_the_engine_is_a_server_error(proxies: Proxies, sdk: type[Sdk]) -> None:
    async def run() -> None:
        options: dict[str, Any] = {"request_timeout_s": 0.5}
        async with proxies.run(**options) as proxy, proxy.session("k") as harness:
            proxy.engine.script += [Scripted(delay_s=20)] * 4
            error = await raised("upstream_timeout", sdk(harness), 504)
            assert int(error.response.headers["retry-after"]) > 0
            await eventually(lambda: not proxy.engine.running, "the abort")

    asyncio.run(run())


@every_sdk
def test_a_client_that_times_out_aborts_its_call(proxies: Proxies, sdk: type[Sdk]) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k") as harness:
            client = sdk(harness)
            client.say("warm up")
            await client.turn()
            client.say("wait")
            for stream in (False, True):
                proxy.engine.script.append(Scripted("late", delay_s=20))
                slow = sdk(harness, timeout_s=1.0, history=list(client.history))
                started = time.monotonic()
                with pytest.raises(client.errors["timeout"]):
                    await slow.turn(stream)
                assert time.monotonic() - started < 5
            await eventually(lambda: proxy.engine.aborted == 2 and not proxy.engine.running, "the aborts")
            assert (await client.turn()).text == "ok"
            trace = await proxy.supervisor.close_session("k")
            assert len(trace.calls) == 2 and trace.counters["aborted"] == 2

    asyncio.run(run())


@every_sdk
def test_a_dead_connection_is_a_connection_error(proxies: Proxies, sdk: type[Sdk]) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k") as harness:
            client = sdk(harness)
            client.say("hello")
            await client.turn()
            await proxy.supervisor.close_session("k")
            client.say("hello?")
            with pytest.raises(client.errors["connection"]):
                await client.turn()

    asyncio.run(run())

"""The official SDKs as clients of the running proxy: what they make of its answers, streamed and not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from proxy_helpers import Proxies
from sdk_clients import AnthropicSdk, ChatSdk, GeminiSdk, ResponsesSdk, Sdk

from pipeline.capture.rows import rows
from pipeline.engine.scripted import Scripted, call_text
from pipeline.records import Trace

SDKS: list[type[Sdk]] = [ChatSdk, ResponsesSdk, AnthropicSdk, GeminiSdk]
every_sdk = pytest.mark.parametrize("sdk", SDKS)
streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
CAFE = "caf\u00e9 \u2192 \U0001f600"


def bash(command: str) -> str:
    return call_text("bash", {"command": command})


@streamed_or_not
@every_sdk
def test_a_conversation_with_tools_is_one_row(proxies: Proxies, sdk: type[Sdk], stream: bool) -> None:
    """Text, a call, text beside two parallel calls, their results, an end; with true token counts throughout."""

    async def run() -> Trace:
        async with proxies.run() as proxy, proxy.session("k", max_tokens=500) as harness:
            client = sdk(harness)
            proxy.engine.script += [
                Scripted("Hello " + CAFE),
                Scripted(bash("ls " + CAFE)),
                Scripted("Both:\n" + bash("pwd") + call_text("look", {"command": "x\ny"})),
                Scripted("done"),
            ]
            client.say("hi " + CAFE)
            first = await client.turn(stream)
            assert (first.text, first.calls, first.finish) == ("Hello " + CAFE, [], "stop")
            client.say("list")
            second = await client.turn(stream)
            assert (second.text, second.finish) == ("", "tool_calls")
            assert [call[1:] for call in second.calls] == [("bash", {"command": "ls " + CAFE})]
            client.results(second, ["a.py\n" + CAFE])
            third = await client.turn(stream)
            assert third.text == "Both:\n" and third.finish == "tool_calls"
            assert [call[1:] for call in third.calls] == [("bash", {"command": "pwd"}), ("look", {"command": "x\ny"})]
            assert len({call[0] for call in second.calls + third.calls}) == 3
            client.results(third, ["/tmp", "seen"])
            last = await client.turn(stream)
            assert (last.text, last.finish) == ("done", "stop")
            said = [first, second, third, last]
            sampled = [(len(sample.prompt), len(sample.ids)) for sample in proxy.engine.samples]
            assert [(one.prompt_tokens, one.completion_tokens) for one in said] == sampled
            return await proxy.supervisor.close_session("k")

    trace = asyncio.run(run())
    assert [call.parent for call in trace.calls] == [None, 0, 1, 2]
    assert all(call.delivered and call.trainable for call in trace.calls)
    (row,) = rows(trace)
    assert row.trained_tokens == sum(len(call.sampled_ids) for call in trace.calls)
    assert set(trace.counters) <= {"audited"}  # one turn in a hundred is


@every_sdk
def test_thoughts_come_in_the_apis_own_shape_and_may_go_back(proxies: Proxies, sdk: type[Sdk]) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k", max_tokens=500) as harness:
            client = sdk(harness)
            for stream in (False, True):
                proxy.engine.script += [Scripted("<think>hm, " + CAFE + "</think>yes"), Scripted("next")]
                client.say("think")
                said = await client.turn(stream)
                assert (said.reasoning, said.text) == ("hm, " + CAFE, "yes")
                client.say("go on")
                assert (await client.turn(stream)).text == "next"
            trace = await proxy.supervisor.close_session("k")
            assert [call.parent for call in trace.calls] == [None, 0, 1, 2]

    asyncio.run(run())


@every_sdk
def test_choices_and_formats_reach_the_engine_and_are_not_trained(proxies: Proxies, sdk: type[Sdk]) -> None:
    """A grammar shapes the sample, so its logprobs are not the policy's; "none" and "auto" are no grammar."""

    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k", max_tokens=500) as harness:
            wishes = ["auto", "none", "required", "look", "json"]
            for wish in wishes:
                client = sdk(harness)
                client.say("do " + wish)
                script = {"none": "no", "json": '{"good": true}'}.get(wish, bash("ls"))
                proxy.engine.script.append(Scripted(script))
                said = await client.turn(**(client.as_json() if wish == "json" else client.choose(wish)))
                assert bool(said.calls) == (wish in ("auto", "required", "look"))
                asked = proxy.engine.rendered[-1]
                named = {"type": "function", "function": {"name": "look"}}
                expected = {"auto": (None, "auto"), "look": (named,), "json": (None, "auto")}.get(wish, (wish,))
                assert asked.get("tool_choice") in expected
                assert bool(asked.get("response_format")) == (wish == "json")
            trace = await proxy.supervisor.close_session("k")
            assert [call.trainable for call in trace.calls] == [True, True, False, False, False]

    asyncio.run(run())


@every_sdk
def test_one_call_at_a_time_on_request(proxies: Proxies, sdk: type[Sdk]) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k", max_tokens=500) as harness:
            client = sdk(harness)
            proxy.engine.script.append(Scripted(bash("ls") + bash("pwd")))
            client.say("go")
            wish = client.one_call_only()
            assert len((await client.turn(**wish)).calls) == (1 if wish else 2)

    asyncio.run(run())


@streamed_or_not
@every_sdk
def test_a_cut_answer_says_so(proxies: Proxies, sdk: type[Sdk], stream: bool) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k", max_tokens=500) as harness:
            client = sdk(harness)
            proxy.engine.script.append(Scripted("a long answer"))
            client.say("go")
            said = await client.turn(stream, **client.at_most(6))
            assert (said.text, said.finish, said.completion_tokens) == ("a long", "length", 6)

    asyncio.run(run())


@pytest.mark.parametrize("sdk", [AnthropicSdk, GeminiSdk])
def test_tokens_are_counted_as_the_engine_counts_them(proxies: Proxies, sdk: type[Sdk]) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k") as harness:
            client = sdk(harness)
            client.say("count " + CAFE)
            count = await client.count()
            assert proxy.engine.generated == []
            assert (await client.turn()).prompt_tokens == count

    asyncio.run(run())


def test_openais_model_list_names_the_policy(proxies: Proxies) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k") as harness:
            assert [model.id async for model in ChatSdk(harness).client().models.list()] == ["policy"]
            models: Any = AnthropicSdk(harness).client().models.list()
            assert [model.id async for model in models] == ["policy"]

    asyncio.run(run())

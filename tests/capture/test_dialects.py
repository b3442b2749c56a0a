"""Dialects as their own SDKs see them, over the running proxy."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import openai
import pytest
from proxy_helpers import BASH, Harness, Proxies

from pipeline.capture.budget import LAST_ANSWERS, LAST_WORDS
from pipeline.engine.scripted import Scripted, call_text, render

USER: list[Any] = [{"role": "user", "content": "hello"}]
TOOL = {"name": "bash", "description": "run", "input_schema": {"type": "object"}}


def openai_client(harness: Harness) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=str(harness.http.base_url.join("/v1")), api_key=harness.key, max_retries=0)


def anthropic_client(harness: Harness) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=str(harness.http.base_url), api_key=harness.key, max_retries=0)


def test_openai_sdk_reads_streams_answers_and_errors(proxies: Proxies) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k", max_calls=2) as harness:
            client = openai_client(harness)
            proxy.engine.script += [Scripted("see " + call_text("bash", {"c": "ls"})), Scripted("cut", finish="length")]
            tools: Any = [BASH]
            async with client.chat.completions.stream(model="m", messages=USER, tools=tools) as stream:
                completion = await stream.get_final_completion()
            choice = completion.choices[0]
            assert (choice.message.content, choice.finish_reason) == ("see ", "tool_calls")
            assert choice.message.tool_calls and choice.message.tool_calls[0].function.name == "bash"
            plain = await client.chat.completions.create(model="m", messages=USER)
            assert (plain.choices[0].message.content, plain.choices[0].finish_reason) == ("cut", "length")
            for _ in range(LAST_ANSWERS):
                last = await client.chat.completions.create(model="m", messages=USER)
                assert (last.choices[0].message.content, last.choices[0].finish_reason) == (LAST_WORDS, "stop")
            with pytest.raises(openai.BadRequestError, match="budget"):
                await client.chat.completions.create(model="m", messages=USER)
            assert [model.id async for model in client.models.list()] == ["policy"]

    asyncio.run(run())


def test_anthropic_sdk_reads_streams_answers_and_errors(proxies: Proxies) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k", max_calls=2) as harness:
            client = anthropic_client(harness)
            proxy.engine.script += [Scripted("see " + call_text("bash", {"c": "ls"})), Scripted("done")]
            tools: Any = [TOOL]
            async with client.messages.stream(model="m", max_tokens=99, messages=USER, tools=tools) as stream:
                first = await stream.get_final_message()
            text, call = first.content
            assert (text.type, call.type, first.stop_reason) == ("text", "tool_use", "tool_use")
            assert call.type == "tool_use" and call.input == {"c": "ls"}
            assert first.usage.input_tokens == len(render(USER))
            history = [
                *USER,
                {"role": "assistant", "content": [block.model_dump() for block in first.content]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "a.py"}]},
            ]
            count = await client.messages.count_tokens(model="m", messages=history, tools=tools)
            second = await client.messages.create(model="m", max_tokens=99, messages=history, tools=tools)
            assert second.stop_reason == "end_turn" and second.usage.input_tokens == count.input_tokens
            for _ in range(LAST_ANSWERS):
                async with client.messages.stream(model="m", max_tokens=9, messages=USER) as stream:
                    last = await stream.get_final_message()
                assert last.content[0].type == "text" and last.content[0].text == LAST_WORDS
                assert last.stop_reason == "end_turn"
            with pytest.raises(anthropic.BadRequestError, match="budget"):
                await client.messages.create(model="m", max_tokens=9, messages=USER)
            client.api_key = "wrong"
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model="m", max_tokens=9, messages=USER)
            assert (await harness.http.head("/")).status_code == 200
            assert (await harness.http.get("/api/hello")).status_code == 200
            trace = await proxy.supervisor.close_session("k")
            assert [call.parent for call in trace.calls] == [None, 0] and trace.dialect == "anthropic"

    asyncio.run(run())

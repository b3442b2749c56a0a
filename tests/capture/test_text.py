"""Text mode end to end: real shard processes in front of a scripted Chat Completions server that gives no ids."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy_helpers import BASH, Proxies, deaf_client, eventually

from pipeline.capture.dialects.base import Answer
from pipeline.capture.rows import rows
from pipeline.capture.transcript import Transcript
from pipeline.engine.scripted import FakeEngine, Scripted

USER = [{"role": "user", "content": "hello"}]


def calls(*commands: str) -> dict[str, Any]:
    """An assistant message with tool calls, with the ids of the upstream."""
    functions = [{"name": "bash", "arguments": json.dumps({"command": command})} for command in commands]
    made = [{"id": f"theirs_{i}", "type": "function", "function": function} for i, function in enumerate(functions)]
    return {"role": "assistant", "content": None, "tool_calls": made}


@dataclass
class FakeUpstream(FakeEngine):
    """Answers with the messages of ``says``, or with (status, body) pairs in it; then with "ok"."""

    says: deque[Any] = field(default_factory=deque)
    usage: dict[str, Any] | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    finish: str = "stop"
    delay_s: float = 0.0

    async def _answer(self, path: str, body: Any, reader: asyncio.StreamReader) -> tuple[Any, ...] | None:
        self.asked.append(body)
        said = self.says.popleft() if self.says else {"role": "assistant", "content": "ok"}
        if self.delay_s and await self._left(reader, Scripted(delay_s=self.delay_s)):
            self.aborted += 1
            return None
        if isinstance(said, tuple):
            return said
        choice = {"index": 0, "message": said, "finish_reason": self.finish}
        return 200, {"choices": [choice]} | ({"usage": self.usage} if self.usage else {})


def text(proxies: Proxies, upstream: FakeUpstream, **options: Any) -> Any:
    return proxies.run(engine=upstream, upstream="text", **options)


def test_a_conversation_is_delivered_and_kept_as_text(proxies: Proxies) -> None:
    async def run() -> None:
        usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}}
        upstream = FakeUpstream(says=deque([calls("ls", "pwd")]), usage=usage)
        async with text(proxies, upstream) as proxy, proxy.session("k", temperature=0.7, max_tokens=50) as harness:
            body = (await harness.ask(USER, tools=[BASH], temperature=0.1, top_p=0.3)).json()
            answer = body["choices"][0]["message"]
            assert body["choices"][0]["finish_reason"] == "tool_calls"
            assert body["usage"]["prompt_tokens"] == 9 and body["usage"]["completion_tokens"] == 4
            assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
            ids = [call["id"] for call in answer["tool_calls"]]
            assert not any("theirs" in name for name in ids) and len(set(ids)) == 2
            del answer["refusal"]
            history = [*USER, answer, *({"role": "tool", "tool_call_id": name, "content": "x"} for name in ids)]
            assert (await harness.message(history, tools=[BASH], max_tokens=7))["content"] == "ok"
            trace = await proxy.supervisor.close_session("k")
        wanted = {"model": "policy", "messages": USER, "temperature": 0.7, "max_tokens": 50, "tools": [BASH]}
        assert upstream.asked == [wanted, wanted | {"messages": history, "max_tokens": 7}]
        assert all(head.startswith("POST /v1/chat/completions ") for head in upstream.heads)
        assert [call.parent for call in trace.calls] == [None, 0]
        assert all(call.delivered and not call.trainable for call in trace.calls)
        assert [(len(c.prompt_ids), len(c.sampled_ids), len(c.logprobs), c.versions) for c in trace.calls] == [
            (0, 0, 0, ())
        ] * 2
        first, second = trace.transcript
        assert first == {"messages": USER, "tools": [BASH], "answer": first["answer"]}
        assert [call["id"] for call in first["answer"]["tool_calls"]] == ids
        assert second["messages"] == history and second["answer"] == {"role": "assistant", "content": "ok"}

    asyncio.run(run())


def test_training_refuses_text(proxies: Proxies) -> None:
    async def run() -> None:
        async with text(proxies, FakeUpstream()) as proxy, proxy.session("k") as harness:
            answer = await harness.message(USER)
            await harness.message([*USER, answer, *USER])
            trace = await proxy.supervisor.close_session("k")
        assert len(trace.calls) == 2 and trace.calls[1].parent == 0 and rows(trace) == ()

    asyncio.run(run())


def test_an_engines_trace_has_no_transcript(proxies: Proxies) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k") as harness:
            await harness.message(USER)
            trace = await proxy.supervisor.close_session("k")
        assert len(trace.calls) == 1 and trace.transcript == ()

    asyncio.run(run())


def test_anthropic_speaks_its_own_dialect(proxies: Proxies) -> None:
    async def run() -> None:
        upstream = FakeUpstream(says=deque([calls("ls") | {"content": "look:", "reasoning_content": "hm"}]))
        async with text(proxies, upstream) as proxy, proxy.session("k") as harness:
            headers = {"x-api-key": "k"}
            tool = {"name": "bash", "input_schema": {"type": "object"}}
            body = {"model": "m", "system": "be brief", "messages": USER, "max_tokens": 9, "tools": [tool]}
            reply = (await harness.http.post("/v1/messages", json=body, headers=headers)).json()
            assert [block["type"] for block in reply["content"]] == ["thinking", "text", "tool_use"]
            assert reply["content"][2]["input"] == {"command": "ls"} and reply["stop_reason"] == "tool_use"
            assert reply["usage"]["output_tokens"] == 0  # the upstream told none
            count = await harness.http.post("/v1/messages/count_tokens", json=body, headers=headers)
            assert count.status_code == 404 and count.json()["error"]["type"] == "not_found_error"
            trace = await proxy.supervisor.close_session("k")
        assert upstream.asked[0]["messages"] == [{"role": "system", "content": "be brief"}, *USER]
        assert trace.transcript[0]["messages"] == upstream.asked[0]["messages"]
        assert trace.dialect == "anthropic"

    asyncio.run(run())


def test_the_key_goes_upstream_and_never_into_argv(proxies: Proxies, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        upstream = FakeUpstream()
        async with text(proxies, upstream, path="/api/v1/", upstream_key="s3cret") as proxy, proxy.session("k") as h:
            await h.message(USER)
            shown = Path(f"/proc/{proxy.pids()[0]}/cmdline").read_text()
            assert "s3cret" not in shown and "--upstream" in shown
        assert upstream.heads[0].startswith("POST /api/v1/chat/completions ")
        assert "authorization: Bearer s3cret" in upstream.heads[0].replace("Authorization", "authorization")

    monkeypatch.setenv("YOKE_UPSTREAM_KEY", "of the environment")
    asyncio.run(run())


def test_outages_and_busy_upstreams_are_waited_out(proxies: Proxies) -> None:
    async def run() -> None:
        upstream = FakeUpstream(says=deque([(500, {}), (429, {}), {"role": "assistant", "content": "up"}]))
        async with text(proxies, upstream) as proxy, proxy.session("k") as harness:
            assert (await harness.message(USER))["content"] == "up"
            await proxy.engine.stop()
            waiting = asyncio.create_task(harness.message([*USER, *USER]))
            await asyncio.sleep(0.3)
            await proxy.engine.start()
            assert (await waiting)["content"] == "ok"
            trace = await proxy.supervisor.close_session("k")
            assert len(trace.calls) == 2 and trace.counters == {"outages": 2}

    asyncio.run(run())


def test_a_busy_upstream_is_given_the_time_that_it_asks_for(proxies: Proxies) -> None:
    async def run() -> None:
        busy = (429, {}, ("retry-after", 1))
        upstream = FakeUpstream(says=deque([busy, {"role": "assistant", "content": "up"}]))
        async with text(proxies, upstream) as proxy, proxy.session("k") as harness:
            began = time.monotonic()
            assert (await harness.message(USER))["content"] == "up"
            assert time.monotonic() - began >= 1.0 and len(upstream.asked) == 2
            upstream.says.append((429, {}, ("retry-after", 9000)))
            reply = await harness.ask([*USER, *USER])  # longer than anybody waits: at once, not after some tries
            assert reply.status_code == 429 and reply.headers["retry-after"] == "9000"
            assert len(upstream.asked) == 3
            counted = (await proxy.supervisor.close_session("k")).counters
            assert counted == {"outages": 2, "engine_failures": 1}

    asyncio.run(run())


def test_a_long_outage_ends_in_503_and_costs_no_budget(proxies: Proxies) -> None:
    async def run() -> None:
        upstream = FakeUpstream(says=deque([(503, {})] * 9))
        async with text(proxies, upstream, outage_s=0.3) as proxy, proxy.session("k", max_calls=1) as harness:
            reply = await harness.ask(USER)
            assert reply.status_code == 503 and int(reply.headers["retry-after"]) > 0
            upstream.says.clear()
            assert (await harness.ask(USER)).status_code == 200
            assert (await harness.ask([*USER, *USER])).headers["x-yoke-budget"] == "calls"
            trace = await proxy.supervisor.close_session("k")
            assert trace.counters == {"engine_failures": 1, "outages": 1, "over_budget": 1}

    asyncio.run(run())


def test_refusals_become_the_dialects_errors(proxies: Proxies) -> None:
    async def run() -> None:
        full = {"error": {"message": "too long", "code": "context_length_exceeded"}}
        refusals = [(400, full), (400, {"error": {"message": "bad tool"}}), (401, {"error": {"message": "key s3cr"}})]
        upstream = FakeUpstream(says=deque([*refusals, (200, {"choices": []}), (200, {"hello": 1})]))
        async with text(proxies, upstream) as proxy, proxy.session("k") as harness:
            replies = [await harness.ask(USER) for _ in range(5)]
            assert [reply.status_code for reply in replies] == [400, 400, 500, 500, 500]
            assert replies[0].json()["error"]["code"] == "context_length_exceeded"
            assert replies[1].json()["error"]["message"] == "bad tool"
            assert "s3cr" not in replies[2].text
            assert (await proxy.supervisor.close_session("k")).counters == {"engine_failures": 3}

    asyncio.run(run())


def test_a_client_that_leaves_aborts_its_call_upstream(proxies: Proxies) -> None:
    async def run() -> None:
        upstream = FakeUpstream(delay_s=20)
        async with text(proxies, upstream) as proxy, proxy.session("k") as harness:
            with pytest.raises(httpx.ReadTimeout):
                headers = {"authorization": "Bearer k"}
                await harness.http.post("/chat/completions", json={"messages": USER}, headers=headers, timeout=1.0)
            await eventually(lambda: upstream.aborted == 1, "the abort")
            upstream.delay_s = 0
            assert (await harness.message(USER))["content"] == "ok"
            assert (await proxy.supervisor.close_session("k")).counters == {"aborted": 1}

    asyncio.run(run())


def test_an_undelivered_answer_and_the_transcript_outlive_a_shard(proxies: Proxies) -> None:
    async def run() -> None:
        upstream = FakeUpstream()
        async with text(proxies, upstream) as proxy, proxy.session("k", send_buffer=4096) as harness:
            first = await harness.message(USER)
            del first["refusal"]
            history = [*USER, first, {"role": "user", "content": "go on"}]
            upstream.says.append({"role": "assistant", "content": "a" * 900_000})
            deaf = deaf_client(harness.http.base_url.port, {"messages": history})
            journal = proxies.directory / "shard-0.journal"
            await eventually(lambda: journal.stat().st_size > 900_000, "the journalled answer")
            os.kill(proxy.pids()[0], signal.SIGKILL)
            deaf.close()
            await asyncio.sleep(0.2)
            assert (await harness.insist(history))["content"] == "a" * 900_000
            assert len(upstream.asked) == 2
            trace = await proxy.supervisor.close_session("k")
            assert [call.parent for call in trace.calls] == [None, 0] and trace.counters == {"redelivered": 1}
            assert [entry["messages"] for entry in trace.transcript] == [USER, history]

    asyncio.run(run())


MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.sampled_from("ab")})


@given(st.lists(st.tuples(st.lists(MESSAGE, max_size=4), st.sampled_from([None, [BASH], [BASH, BASH]])), max_size=6))
def test_a_transcript_restores_every_request(requests: list[tuple[list[dict[str, Any]], Any]]) -> None:
    transcript = Transcript()
    for messages, tools in requests:
        transcript.add(transcript.asked(messages, tools))
    answer = Answer("x", "t", "", (), "stop", 0, 0, 0, 0)
    nodes = [type("N", (), {"answer": answer})] * len(requests)
    restored = [(entry["messages"], entry["tools"]) for entry in transcript.export(nodes)]
    assert restored == [(messages, tools or []) for messages, tools in requests]

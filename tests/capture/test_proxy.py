"""The proxy end to end: real shard processes and sockets, a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard
from proxy_helpers import BASH, Proxies, deaf_client, events, eventually

from pipeline.capture import supervisor as supervisor_module
from pipeline.capture.rows import rows
from pipeline.capture.shard_process import CaptureError
from pipeline.engine.scripted import END, WINDOW, Scripted, call_text, logprob, render
from pipeline.records import PolicyVersion

USER = [{"role": "user", "content": "hello"}]


async def _status_of_a_huge_body(port: int) -> int:
    """The reply to the head of a request whose body is too large to send."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /chat/completions HTTP/1.1\r\nauthorization: Bearer k\r\ncontent-length: 99999999999\r\n\r\n")
    status = int((await reader.readline()).split()[1])
    writer.close()
    return status


def test_an_answer_is_captured_as_it_was_sampled(proxies: Proxies) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("key-1", temperature=0.7, max_tokens=50) as harness:
            await proxy.supervisor.set_policy_version(PolicyVersion(1, 3))
            proxy.engine.script.append(Scripted("hi there"))
            reply = (await harness.ask(USER, temperature=0.1, top_p=0.2, stop=["t"], seed=5)).json()
            assert reply["choices"][0]["message"]["content"] == "hi there"
            assert reply["choices"][0]["finish_reason"] == "stop"
            prompt = render(USER)
            total = len(prompt) + 9
            assert (reply["usage"]["prompt_tokens"], reply["usage"]["total_tokens"]) == (len(prompt), total)
            sent = proxy.engine.generated[0]
            assert sent["cache_salt"] == "1.3"
            assert sent["sampling_params"]["temperature"] == 0.7
            assert (sent["sampling_params"]["top_p"], sent["sampling_params"]["top_k"]) == (1.0, 0)
            assert sent["sampling_params"]["max_tokens"] == 50
            assert "seed" not in sent["sampling_params"] and "stop" not in sent["sampling_params"]
            trace = await proxy.supervisor.close_session("key-1")
        (call,) = trace.calls
        assert call.prompt_ids.tolist() == prompt
        assert call.sampled_ids.tolist() == [*b"hi there", END]
        assert np.array_equal(call.logprobs, np.array([logprob(i) for i in range(9)], np.float32))
        assert call.versions[0].version == PolicyVersion(1, 3)
        assert call.delivered and call.trainable and not call.malformed and trace.dialect == "chat"

    asyncio.run(run())


def test_a_rollout_over_a_sync_keeps_the_version_of_every_span(proxies: Proxies) -> None:
    """The first call is over before the sync, the second is in flight, the third comes after it."""

    async def run() -> None:
        old, new = PolicyVersion(1, 9), PolicyVersion(1, 10)
        async with proxies.run() as proxy, proxy.session("k") as harness:
            await proxy.supervisor.set_policy_version(old)
            proxy.engine.script += [Scripted("one"), Scripted("two, three", synced=(4, str(new))), Scripted("four")]
            for number in range(3):
                if number == 2:
                    await proxy.supervisor.set_policy_version(new)
                await harness.message([{"role": "user", "content": f"ask {number}"}])
            trace = await proxy.supervisor.close_session("k")
        spans = [[(span.version, span.start, span.end) for span in call.versions] for call in trace.calls]
        assert spans == [[(old, 0, 4)], [(old, 0, 4), (new, 4, 11)], [(new, 0, 5)]]
        assert [call.version for call in trace.calls] == [old, old, new]

    asyncio.run(run())


def test_a_stream_carries_text_calls_usage_and_end(proxies: Proxies) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k") as harness:
            proxy.engine.script.append(
                Scripted("look: " + call_text("bash", {"c": "ls"}) + call_text("bash", {"c": "pwd"}))
            )
            reply = await harness.ask(USER, tools=[BASH], stream=True, stream_options={"include_usage": True})
            assert reply.headers["content-type"] == "text/event-stream"
            chunks = events(reply.text)
            deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
            assert deltas[0]["role"] == "assistant"
            assert "".join(delta.get("content", "") for delta in deltas) == "look: "
            calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
            assert [call["index"] for call in calls] == [0, 1]
            assert [json.loads(call["function"]["arguments"])["c"] for call in calls] == ["ls", "pwd"]
            assert [call["id"].rsplit("_", 1)[1] for call in calls] == ["1", "2"]
            assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]][-1] == "tool_calls"
            assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["prompt_tokens"] == len(render(USER))
            trace = await proxy.supervisor.close_session("k")
            assert trace.calls[0].tool_calls == 2

    asyncio.run(run())


def test_a_tool_turn_extends_its_parent(proxies: Proxies) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k") as harness:
            proxy.engine.script += [Scripted(call_text("bash", {"c": "ls"})), Scripted("done")]
            answer = await harness.message(USER, tools=[BASH])
            result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": None}
            await harness.message([*USER, answer, result], tools=[BASH])
            trace = await proxy.supervisor.close_session("k")
        assert [call.parent for call in trace.calls] == [None, 0]
        (row,) = rows(trace)
        assert row.trained_tokens == sum(len(call.sampled_ids) for call in trace.calls)

    asyncio.run(run())


def test_only_the_sessions_own_key_is_known_on_its_listener(proxies: Proxies) -> None:
    async def run() -> None:
        async with proxies.run(shards=2) as proxy, proxy.session("one") as one, proxy.session("two") as two:
            one.key, two.key = two.key, one.key
            replies = await asyncio.gather(one.ask(USER), two.ask(USER), one.http.get("/v1/models"))
            assert [reply.status_code for reply in replies] == [401, 401, 401]
            assert replies[0].json()["error"]["code"] == "invalid_api_key"
            bad_json = await one.http.post("/v1/chat/completions", content=b"{", headers={"authorization": "Bearer x"})
            assert bad_json.status_code == 401  # before parsing
            assert proxy.engine.generated == []

    asyncio.run(run())


def test_bad_requests_get_the_dialects_errors(proxies: Proxies) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k") as harness:
            headers = {"authorization": "Bearer k"}
            post = harness.http.post
            assert (await post("/chat/completions", content=b"{", headers=headers)).status_code == 400
            assert (await post("/chat/completions", json=[], headers=headers)).status_code == 400
            assert (await post("/nowhere", json={}, headers=headers)).status_code == 404
            assert (await harness.ask([])).status_code == 400
            assert (await harness.ask(USER, max_tokens="many")).status_code == 400
            assert await _status_of_a_huge_body(harness.http.base_url.port) == 413
            full = await harness.ask([{"role": "user", "content": "x" * WINDOW}])
            assert full.status_code == 400 and full.json()["error"]["code"] == "context_length_exceeded"
            trace = await proxy.supervisor.close_session("k")
            assert trace.calls == () and trace.counters["context_full"] == 1

    asyncio.run(run())


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("zstd", zstandard.compress)])
def test_compressed_bodies_are_read(proxies: Proxies, encoding: str, pack: object) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k") as harness:
            assert callable(pack)
            body = pack(json.dumps({"model": "m", "messages": USER}).encode())
            headers = {"authorization": "Bearer k", "content-encoding": encoding}
            reply = await harness.http.post("/chat/completions", content=body, headers=headers)
            assert reply.json()["choices"][0]["message"]["content"] == "ok"
            headers["content-encoding"] = "br"
            assert (await harness.http.post("/chat/completions", content=body, headers=headers)).status_code == 400

    asyncio.run(run())


def test_max_tokens_is_the_least_of_policy_wish_and_room(proxies: Proxies) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k", max_tokens=100) as harness:
            await harness.ask(USER, max_tokens=7)
            await harness.ask(USER, max_completion_tokens=700)
            await harness.ask([{"role": "user", "content": "x" * (WINDOW - 13)}])
            asked = [body["sampling_params"]["max_tokens"] for body in proxy.engine.generated]
            assert asked == [7, 100, 10]

    asyncio.run(run())


def test_a_client_that_leaves_aborts_its_call(proxies: Proxies) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k") as harness:
            for stream in (False, True):
                proxy.engine.script.append(Scripted("slow", delay_s=20))
                with pytest.raises(httpx.ReadTimeout):
                    body = {"messages": USER, "stream": stream}
                    headers = {"authorization": "Bearer k"}
                    await harness.http.post("/chat/completions", json=body, headers=headers, timeout=1.0)
            await eventually(lambda: proxy.engine.aborted == 2 and not proxy.engine.running, "the aborts")
            assert (await harness.message(USER))["content"] == "ok"
            trace = await proxy.supervisor.close_session("k")
            assert trace.counters["aborted"] == 2 and len(trace.calls) == 1

    asyncio.run(run())


@pytest.mark.parametrize("shard_dies", [False, True])
def test_a_retry_of_an_undelivered_answer_gets_it(proxies: Proxies, shard_dies: bool) -> None:
    """The client reads nothing, so most of a long answer stays in the proxy; then the client or the shard goes."""

    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k", send_buffer=4096, max_tokens=10**5) as harness:
            proxy.engine.script += [Scripted("a" * 90_000), Scripted("another")]
            deaf = deaf_client(harness.http.base_url.port, {"messages": USER})
            journal = proxies.directory / "shard-0.journal"
            await eventually(lambda: journal.stat().st_size > 600_000, "the journalled answer")
            await asyncio.sleep(0.2)
            if shard_dies:
                os.kill(proxy.pids()[0], signal.SIGKILL)
            deaf.close()
            await asyncio.sleep(0.2)
            assert (await harness.message(USER))["content"] == "a" * 90_000
            assert len(proxy.engine.generated) == 1
            assert (await harness.message(USER))["content"] == "another"  # delivered now: a retry is a new sample
            trace = await proxy.supervisor.close_session("k")
            assert [call.delivered for call in trace.calls] == [True, True]
            assert trace.counters == {"redelivered": 1}

    asyncio.run(run())


def test_an_answer_that_nobody_read_is_not_trained(proxies: Proxies) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k", send_buffer=4096, max_tokens=10**5) as harness:
            proxy.engine.script.append(Scripted("a" * 90_000))
            deaf = deaf_client(harness.http.base_url.port, {"messages": USER})
            journal = proxies.directory / "shard-0.journal"
            await eventually(lambda: journal.stat().st_size > 600_000, "the journalled answer")
            deaf.close()
            trace = await proxy.supervisor.close_session("k")
            assert [call.delivered for call in trace.calls] == [False]
            assert rows(trace) == ()

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_delivered_to_a_client_that_wants_its_connection_closed(proxies: Proxies, stream: bool) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k") as harness:
            proxy.engine.script.append(Scripted("x" * 100_000))
            harness.http.headers["connection"] = "close"
            await harness.ask(USER, stream=stream)
            await harness.ask(USER, stream=stream)
            trace = await proxy.supervisor.close_session("k")
            assert [call.delivered for call in trace.calls] == [True, True]
            assert "redelivered" not in trace.counters

    asyncio.run(run())


def test_sigkill_of_a_shard_keeps_the_session(proxies: Proxies) -> None:
    async def run() -> None:
        async with proxies.run(shards=2) as proxy, proxy.session("one") as one, proxy.session("two") as two:
            await proxy.supervisor.set_policy_version(PolicyVersion(2, 7))
            proxy.engine.script += [Scripted("first"), Scripted("first")]
            answers = await asyncio.gather(one.message(USER), two.message(USER))
            old = proxy.pids()
            for pid in old:
                os.kill(pid, signal.SIGKILL)
            more = [[*USER, answer, {"role": "user", "content": "go on"}] for answer in answers]
            await asyncio.gather(one.insist(more[0]), two.insist(more[1]))
            assert proxy.engine.generated[-1]["cache_salt"] == "2.7"
            assert not set(old) & set(proxy.pids())
            traces = [await proxy.supervisor.close_session(key) for key in ("one", "two")]
        for trace in traces:
            assert trace.calls[0].sampled_ids.tolist() == [*b"first", END]
            assert trace.calls[1].parent == 0
            assert len(rows(trace)) == 1 and all(call.delivered for call in trace.calls)

    asyncio.run(run())


def test_a_call_in_flight_survives_the_engines_death(proxies: Proxies) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k") as harness:
            proxy.engine.script += [Scripted(drop=True), Scripted(status=500), Scripted(finish="abort"), Scripted("up")]
            assert (await harness.message(USER))["content"] == "up"
            await proxy.engine.stop()
            waiting = asyncio.create_task(harness.message([*USER, *USER]))
            await asyncio.sleep(0.5)
            await proxy.engine.start()
            assert (await waiting)["content"] == "ok"
            trace = await proxy.supervisor.close_session("k")
            assert len(trace.calls) == 2

    asyncio.run(run())


def test_an_outage_ends_in_503_with_retry_after(proxies: Proxies) -> None:
    async def run() -> None:
        async with proxies.run(outage_s=0.3) as proxy, proxy.session("k", max_calls=1) as harness:
            proxy.engine.script += [Scripted(status=503) for _ in range(9)]
            reply = await harness.ask(USER)
            assert reply.status_code == 503 and int(reply.headers["retry-after"]) > 0
            proxy.engine.script.clear()
            assert (await harness.ask(USER)).status_code == 200  # the failed call cost no budget

    asyncio.run(run())


def test_a_sample_that_started_under_newer_weights_is_drawn_again(proxies: Proxies) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k") as harness:
            await proxy.supervisor.set_policy_version(PolicyVersion(1, 1))
            proxy.engine.version = "1.2"
            proxy.engine.script += [Scripted("stale blocks"), Scripted("fresh")]
            assert (await harness.message(USER))["content"] == "fresh"
            assert [body["cache_salt"] for body in proxy.engine.generated] == ["1.1", "1.2"]
            trace = await proxy.supervisor.close_session("k")
            assert [call.version for call in trace.calls] == [PolicyVersion(1, 2)]
            assert trace.counters == {"resampled": 1}

    asyncio.run(run())


def test_an_engine_without_policy_weights_is_waited_for(proxies: Proxies) -> None:
    """A restarted engine serves the weights on disk, which no policy version names, until it is given the policy's."""

    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k") as harness:
            await proxy.supervisor.set_policy_version(PolicyVersion(1, 1))
            proxy.engine.script += [Scripted("base weights", version="default"), Scripted("policy", version="1.1")]
            assert (await harness.message(USER))["content"] == "policy"
            trace = await proxy.supervisor.close_session("k")
            assert [call.version for call in trace.calls] == [PolicyVersion(1, 1)]
            assert trace.counters == {"unversioned": 1}

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_spent_budget_ends_in_last_words_and_then_in_an_error(proxies: Proxies, stream: bool) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k", max_calls=2) as harness:
            replies = [await harness.ask([*USER * (n + 1)], stream=stream) for n in range(6)]
            assert [reply.status_code for reply in replies] == [200] * 5 + [400]
            assert [reply.headers.get("x-yoke-budget") for reply in replies] == [None] * 2 + ["calls"] * 3 + [None]
            assert ["budget of this session" in reply.text for reply in replies] == [False] * 2 + [True] * 3 + [False]
            assert replies[-1].json()["error"]["code"] == "budget_exceeded"
            trace = await proxy.supervisor.close_session("k")
            assert len(trace.calls) == 2 and trace.counters["over_budget"] == 4
            assert sum(row.trained_tokens for row in rows(trace)) == 6

    asyncio.run(run())


@pytest.mark.parametrize(("budget", "policy"), [("tokens", {"max_session_tokens": 12}), ("wall", {"max_wall_s": 3})])
def test_tokens_and_time_are_budgets_that_outlive_a_shard(
    proxies: Proxies, budget: str, policy: dict[str, float]
) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k", **policy) as harness:
            assert "x-yoke-budget" not in (await harness.ask(USER)).headers  # 8 ids asked, 3 sampled
            if budget == "tokens":
                assert "x-yoke-budget" not in (await harness.ask(USER)).headers
            os.kill(proxy.pids()[0], signal.SIGKILL)
            await asyncio.sleep(3.05 if budget == "wall" else 0)
            await harness.insist([*USER, *USER])
            trace = await proxy.supervisor.close_session("k")
            assert trace.counters["over_budget"] == 1, "the budget did not begin anew with the process"

    asyncio.run(run())


def test_calls_at_once_are_limited(proxies: Proxies) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k", max_concurrent=1) as harness:
            proxy.engine.script.append(Scripted("slow", delay_s=1))
            waiting = asyncio.create_task(harness.ask(USER))
            await eventually(lambda: proxy.engine.running == 1, "the call")
            refused = await harness.ask([*USER, *USER])
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert (await waiting).status_code == 200
            assert (await harness.ask([*USER, *USER])).status_code == 200

    asyncio.run(run())


def test_malformed_and_forced_answers_are_marked(proxies: Proxies) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k") as harness:
            proxy.engine.script += [Scripted("<tool_call>{oops</tool_call>"), Scripted("fine"), Scripted("{}")]
            await harness.message(USER, tools=[BASH])
            await harness.message(USER, tools=[BASH], tool_choice="required")
            await harness.message(USER, response_format={"type": "json_object"})
            *_, forced, shaped = proxy.engine.rendered
            assert forced["tool_choice"] == "required" and shaped["response_format"] == {"type": "json_object"}
            trace = await proxy.supervisor.close_session("k")
            assert [call.malformed for call in trace.calls] == [True, False, False]
            assert [call.trainable for call in trace.calls] == [True, False, False]

    asyncio.run(run())


def test_an_empty_answer_is_delivered_and_captured(proxies: Proxies) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k") as harness:
            proxy.engine.script.append(Scripted(""))
            assert (await harness.message(USER))["content"] == ""
            trace = await proxy.supervisor.close_session("k")
            assert trace.calls[0].sampled_ids.tolist() == [END]

    asyncio.run(run())


def test_sessions_close_and_their_listeners_with_them(proxies: Proxies) -> None:
    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k") as harness:
            proxy.engine.script.append(Scripted("slow", delay_s=20))
            waiting = asyncio.create_task(harness.ask(USER))
            await eventually(lambda: proxy.engine.running == 1, "the call")
            started = time.monotonic()
            trace = await proxy.supervisor.close_session("k")
            assert time.monotonic() - started < 3
            assert trace.counters["aborted"] == 1
            assert (await waiting).status_code == 503
            with pytest.raises(httpx.ConnectError):
                await harness.ask(USER)
            with pytest.raises(CaptureError):
                await proxy.supervisor.close_session("k")
            assert proxy.supervisor.stats()["open_sessions"] == 0

    asyncio.run(run())


def test_a_shard_that_hangs_is_replaced(proxies: Proxies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "SILENT_S", 1.0)
    monkeypatch.setattr(supervisor_module, "HEARTBEAT_S", 0.2)

    async def run() -> None:
        async with proxies.run() as proxy, proxy.session("k") as harness:
            await harness.message(USER)
            await asyncio.sleep(0.1)  # so that its delivery is in the journal
            (hung,) = proxy.pids()
            os.kill(hung, signal.SIGSTOP)
            waiting = asyncio.create_task(harness.insist(USER))
            await asyncio.wait_for(proxy.supervisor.set_policy_version(PolicyVersion(3, 0)), 20)
            assert (await waiting)["content"] == "ok"
            assert proxy.pids() != [hung] and proxy.supervisor.stats()["shard_restarts"] == 1
            assert len((await proxy.supervisor.close_session("k")).calls) == 2

    asyncio.run(run())


def test_a_shard_that_dies_while_it_takes_sessions_up_is_replaced_at_once(
    proxies: Proxies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed again in the middle of the hand-over, in which a session is forgotten as well."""

    async def run() -> None:
        async with proxies.run() as proxy, contextlib.AsyncExitStack() as stack:
            keys = [f"key-{number}" for number in range(9)]
            harnesses = [await stack.enter_async_context(proxy.session(key)) for key in keys]
            opened, deaths = proxy.supervisor._open, [0]

            async def deadly(shard: Any, session_id: str) -> None:
                if session_id == keys[4] and deaths[0] < 2:
                    deaths[0] += 1
                    os.kill(shard.pid, signal.SIGKILL)
                    if deaths[0] == 2:
                        proxy.supervisor._forget(keys[8])
                await opened(shard, session_id)

            monkeypatch.setattr(proxy.supervisor, "_open", deadly)
            began = time.monotonic()
            os.kill(proxy.pids()[0], signal.SIGKILL)
            await asyncio.gather(*(harness.insist(USER, tries=4) for harness in harnesses[:8]))
            assert deaths == [2] and time.monotonic() - began < 20, "far below the deadline of one order"
            assert len((await proxy.supervisor.close_session(keys[7])).calls) == 1

    asyncio.run(run())


ORPHANER = """
import asyncio, os, sys
from pathlib import Path
from pipeline.capture.supervisor import ShardSupervisor

async def run():
    supervisor = ShardSupervisor("http://127.0.0.1:9", 2, Path(sys.argv[1]), "m")
    await supervisor.start()
    print(*[shard.pid for shard in supervisor._shards], flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(run())
"""


def test_shards_end_with_their_parent(tmp_path: Path) -> None:
    parent = subprocess.run([sys.executable, "-c", ORPHANER, str(tmp_path)], capture_output=True, text=True, timeout=60)
    pids = [int(pid) for pid in parent.stdout.split()]
    assert len(pids) == 2, parent.stderr

    def gone(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):  # before it was opened, or after
            return True

    deadline = time.monotonic() + 10
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline, "a shard outlived its parent"
        time.sleep(0.05)

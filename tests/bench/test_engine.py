"""The fake engine behaves like a real one where the proxy looks: template, stop ids, temperature, derender."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from bench.engine import FakeEngine
from bench.tokens import CLOSE, LOGPROBS, NEWLINE, POOL

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]
USER = {"role": "user", "content": "x"}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine((0.5, 2.0), (128, 512))


def post(engine: FakeEngine, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = engine.answer(b"POST", path.encode(), json.dumps(body, separators=(",", ":")).encode())
    assert reply.status == 200, reply.body
    return dict(json.loads(reply.body))


def render(engine: FakeEngine, *messages: dict[str, Any], tools: Any = None) -> list[int]:
    return list(post(engine, "/v1/chat/completions/render", {"messages": messages, "tools": tools})["token_ids"])


def generate(engine: FakeEngine, ids: list[int], **params: Any) -> dict[str, Any]:
    body = {"token_ids": ids, "sampling_params": params, "cache_salt": "0.3"}
    return dict(post(engine, "/inference/v1/generate", body)["choices"][0])


def derender(engine: FakeEngine, ids: list[int], tools: Any = TOOLS) -> dict[str, Any]:
    body = {"generate_response": {"choices": [{"token_ids": ids}]}, "chat_request": {"messages": [], "tools": tools}}
    return dict(post(engine, "/v1/chat/completions/derender", body)["choices"][0]["message"])


def call(arguments: str) -> dict[str, Any]:
    return {"id": "c0", "type": "function", "function": {"name": "bash", "arguments": arguments}}


def common_suffix(one: list[int], two: list[int]) -> list[int]:
    size = next(i for i, (a, b) in enumerate(zip(reversed(one), reversed(two), strict=False)) if a != b)
    return one[len(one) - size :]


@pytest.mark.parametrize("shape", ["text", "call"])
def test_the_suffix_after_a_sentinel_is_that_of_the_whole_conversation(engine: FakeEngine, shape: str) -> None:
    """Two sentinels differ, all after them is equal, and it is what the full render has after the sampled answer."""

    def shaped(word: str) -> dict[str, Any]:
        if shape == "text":
            return {"role": "assistant", "content": word}
        return {"role": "assistant", "content": None, "tool_calls": [call(json.dumps({"a": word}))]}

    new = {"role": "tool", "tool_call_id": "c0", "content": "out"}
    one, two = (render(engine, USER, shaped(word), new) for word in ("QUARTZ", "MAPLE"))
    suffix = common_suffix(one, two)
    suffix = suffix[suffix.index(CLOSE) :]

    prompt = render(engine, USER, tools=TOOLS)
    sampled = generate(engine, prompt, max_tokens=4096)["token_ids"]
    message = derender(engine, sampled[:-1])
    whole = render(engine, USER, {"role": "assistant"} | message, new, tools=TOOLS)
    assert sampled[-1] == suffix[0] == CLOSE
    assert suffix[1] == NEWLINE
    assert prompt + sampled + suffix[1:] == whole


def test_an_answer_shown_without_its_call_breaks_continuity(engine: FakeEngine) -> None:
    prompt = render(engine, USER, tools=TOOLS)
    sampled = generate(engine, prompt, max_tokens=4096)["token_ids"]
    text = derender(engine, sampled[:-1])["content"]
    split = render(engine, USER, {"role": "assistant", "content": text}, USER, tools=TOOLS)
    assert split[: len(prompt)] == prompt
    assert split[: len(prompt) + len(sampled)] != prompt + sampled


def test_only_the_closing_id_stops_a_forced_sample(engine: FakeEngine) -> None:
    stop = generate(engine, [1], allowed_token_ids=[CLOSE], max_tokens=2)
    other = generate(engine, [1], allowed_token_ids=[NEWLINE], max_tokens=2)
    assert (stop["finish_reason"], stop["token_ids"]) == ("stop", [CLOSE])
    assert (other["finish_reason"], other["token_ids"]) == ("length", [NEWLINE, NEWLINE])


def test_sampled_ids_and_logprobs_are_slices_of_the_pool(engine: FakeEngine) -> None:
    choice = generate(engine, [1, 2], max_tokens=4096, logprobs=0)
    ids, count = choice["token_ids"][:-1], len(choice["token_ids"]) - 1
    at = next(i for i in np.flatnonzero(ids[0] == POOL) if POOL[i : i + count].tolist() == ids)
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert np.array_equal(np.asarray(logprobs[:-1], dtype=np.float32), LOGPROBS[at : at + count])
    assert choice["weight_versions"] == [{"version": "0.3", "start": 0, "end": count + 1}]


def test_a_cut_sample_has_no_closing_id(engine: FakeEngine) -> None:
    choice = generate(engine, [1], max_tokens=5)
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == 5 and CLOSE not in choice["token_ids"]


def test_the_temperature_shows_in_the_gap_between_the_best_tokens(engine: FakeEngine) -> None:
    gaps = []
    for temperature in (1.0, 2.0):
        tops = generate(engine, [1], max_tokens=1, logprobs=2, temperature=temperature)["logprobs"]["content"][0]
        best, second = (top["logprob"] for top in tops["top_logprobs"])
        gaps.append(best - second)
    assert gaps[1] == pytest.approx(gaps[0] / 2)


def test_samples_are_told_apart_even_among_many(engine: FakeEngine) -> None:
    """Derender finds each sample by its first ids, so no two may begin alike."""
    seen = {}
    for _ in range(3000):
        choice = generate(engine, [1], max_tokens=4096)
        seen[tuple(choice["token_ids"][:-1])] = len(choice["token_ids"]) - 1
    for ids, size in seen.items():
        assert f":{size}:" in derender(engine, list(ids))["content"]
    assert len({ids[:4] for ids in seen}) == len(seen) == 3000


def test_no_tools_no_call(engine: FakeEngine) -> None:
    sampled = generate(engine, [1], max_tokens=4096)["token_ids"][:-1]
    assert derender(engine, sampled, tools=None)["tool_calls"] == []
    assert json.loads(derender(engine, sampled)["tool_calls"][0]["function"]["arguments"])["command"]


def test_an_empty_answer_is_refused(engine: FakeEngine) -> None:
    body = b'{"generate_response":{"choices":[{"token_ids":[]}]}}'
    assert engine.answer(b"POST", b"/v1/chat/completions/derender", body).status == 400


def test_chat_agrees_with_the_three_calls(engine: FakeEngine) -> None:
    body = {"messages": [USER], "tools": TOOLS, "logprobs": True, "return_token_ids": True, "max_tokens": 4096}
    reply = post(engine, "/v1/chat/completions", body)
    choice = reply["choices"][0]
    assert reply["prompt_token_ids"] == render(engine, USER, tools=TOOLS)
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == reply["usage"]["completion_tokens"]
    assert choice["finish_reason"] == "tool_calls"
    assert derender(engine, choice["token_ids"][:-1])["content"] == choice["message"]["content"]

"""Checks that ask an engine, against scripted ones that are right, and wrong in one way each; and against a trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_threads import engine_thread
from preflight_helpers import assert_refused, outcome, settings
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline.engine import scripted
from pipeline.engine.scripted import FakeEngine, Scripted, Template, logprob
from pipeline.launch import preflight_engine
from pipeline.launch.preflight_check import Forward, Grounds, Result
from pipeline.launch.preflight_engine import GAPS, MORE, forward_of
from pipeline.training.forward import PolicyModel

NAMES = "claude-code,codex,gemini-cli,qwen-code,opencode,pi,mini-swe-agent,mistral-vibe,openhands,terminus-2"
TEN = f"mix.harnesses=[{NAMES}]"
OFF, ON = "harness.sampling.thinking=false", "harness.sampling.thinking=true"


def look(name: str, engine: FakeEngine, *words: str) -> Result:
    with engine_thread(engine):
        return outcome(name, Grounds(settings(*words), url=engine.url))


class Parser(FakeEngine):
    """Its parser does with an answer what ``hears`` says."""

    def hears(self, body: Any, message: dict[str, Any]) -> None:
        raise NotImplementedError

    async def _answer(self, path: str, body: Any, reader: asyncio.StreamReader) -> tuple[Any, ...] | None:
        reply = await super()._answer(path, body, reader)
        if path.endswith("/derender"):
            assert reply is not None
            self.hears(body, reply[1]["choices"][0]["message"])
        return reply


class Deaf(Parser):
    """A parser of another family: calls stay text."""

    def hears(self, body: Any, message: dict[str, Any]) -> None:
        ids = body["generate_response"]["choices"][0]["token_ids"]
        message |= {"content": scripted.decoded(ids), "tool_calls": []}


class Swallowing(Parser):
    """A reasoning parser that waits for the end of a thought that was never begun."""

    def hears(self, body: Any, message: dict[str, Any]) -> None:
        ids = body["generate_response"]["choices"][0]["token_ids"]
        message |= {"content": None, "reasoning": scripted.decoded(ids), "tool_calls": []}


class Stringly(Parser):
    """A parser that takes every argument for a string."""

    def hears(self, body: Any, message: dict[str, Any]) -> None:
        for call in message["tool_calls"]:
            call["function"]["arguments"] = call["function"]["arguments"].replace("false", '"false"')


class Raw(FakeEngine):
    """Its logprobs are those before the temperature."""

    async def _generate(self, body: Any, reader: asyncio.StreamReader) -> tuple[Any, ...] | None:
        body["sampling_params"]["temperature"] = 1.0
        return await super()._generate(body, reader)


class Forgetful(FakeEngine):
    """Its template shows no tool call of the history."""

    def _render(self, body: Any) -> tuple[Any, ...]:
        plain = [{k: v for k, v in message.items() if k != "tool_calls"} for message in body["messages"]]
        return super()._render(body | {"messages": plain})


class Blank(FakeEngine):
    """Its template shows nothing of a conversation."""

    def _render(self, body: Any) -> tuple[Any, ...]:
        return 200, {"token_ids": [1, 2, 3], "sampling_params": {}}


class Short(FakeEngine):
    """A window of 4096 tokens."""

    async def _answer(self, path: str, body: Any, reader: asyncio.StreamReader) -> tuple[Any, ...] | None:
        if path == "/v1/models":
            return 200, {"data": [{"id": "policy", "max_model_len": 4096}]}
        return await super()._answer(path, body, reader)


# --- engine


def test_a_smaller_window_than_everybody_is_told_is_refused() -> None:
    assert look("engine", FakeEngine()).result == "ok"
    assert look("engine", Short(), "model.max_model_len=4096").result == "ok"
    assert_refused(look("engine", Short()), "model.max_model_len=65536, but the engine serves 4096 tokens")


def test_an_engine_that_does_not_answer_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_engine, "OUTAGE_S", 0.2)
    assert_refused(outcome("engine", Grounds(settings(), url="http://127.0.0.1:1")), "the check could not be made")


@pytest.mark.parametrize("name", ["engine", "parser", "thinking", "continuity", "logprobs", "trainer"])
def test_without_an_engine_nothing_is_said_of_it(name: str) -> None:
    assert outcome(name, Grounds(settings(OFF))).result == "skipped"


# --- parser


@pytest.mark.parametrize("template", [Template(), Template(gap="\n"), Template(opens_thought="always")], ids=repr)
def test_every_harness_hears_its_action(template: Template) -> None:
    result = look("parser", FakeEngine(template=template), TEN)
    assert result.result == "ok", result
    assert "claude-code Bash" in result.said and "terminus-2 in text" in result.said


@pytest.mark.parametrize(
    ("engine", "harness", "said"),
    [
        (Deaf(), "pi", "pi: a call of bash came back as text: '<tool_call>"),
        (Swallowing(), "pi", "pi: a call of bash came back as a thought: '<tool_call>"),
        (Swallowing(), "terminus-2", "terminus-2: its text came back as a thought"),
        (Stringly(), "qwen-code", "qwen-code: a call of run_shell_command came back with the arguments"),
        (Forgetful(), "pi", "pi: the chat template cannot write it (shape)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, FakeEngine) else None,
)
def test_a_parser_that_loses_the_action_is_refused(engine: FakeEngine, harness: str, said: str) -> None:
    assert_refused(look("parser", engine, f"mix.harnesses=[{harness}]"), said)


def test_only_the_harnesses_that_lose_theirs_are_named() -> None:
    result = look("parser", Stringly(), TEN)
    assert result.result == "failed" and "qwen-code" in result.said and "codex" not in result.said


# --- thinking


@pytest.mark.parametrize(
    ("template", "words", "said"),
    [
        (Template(), [], "left to the chat template, which does not open a thought"),
        (Template(opens_thought="always"), [], "left to the chat template, which opens a thought"),
        (Template(), [OFF], "none was sampled (the chat template has no switch)"),
        (Template(opens_thought="unless off"), [OFF], "none was sampled"),
        (Template(opens_thought="unless off"), [ON], "on: the switch changes the prompt"),
    ],
)
def test_thoughts_are_as_the_settings_say(template: Template, words: list[str], said: str) -> None:
    result = look("thinking", FakeEngine(template=template), *words)
    assert result.result == "ok" and result.said.endswith(said), result


@pytest.mark.parametrize(
    ("engine", "word", "said"),
    [
        (FakeEngine(template=Template(opens_thought="always")), OFF, "the prompt ends in an open thought"),
        (FakeEngine(answers=lambda prompt: Scripted("<think>hm</think>ok")), OFF, "but the model thinks: 'hm'"),
        (FakeEngine(answers=lambda prompt: Scripted("I <think> so")), OFF, "but the model thinks: 'I <think> so'"),
        (FakeEngine(), ON, "the chat template has no switch for thoughts"),
    ],
    ids=lambda value: "" if isinstance(value, FakeEngine) else None,
)
def test_thoughts_that_are_not_as_the_settings_say(engine: FakeEngine, word: str, said: str) -> None:
    assert_refused(look("thinking", engine, word), said)


# --- continuity and logprobs


def test_continuity_is_told_by_harness() -> None:
    assert "it holds for pi, terminus-2" in look("continuity", FakeEngine(), "mix.harnesses=[pi,terminus-2]").said
    result = look("continuity", Forgetful(), "mix.harnesses=[codex,terminus-2]")
    assert_refused(result, "codex (responses): tool: ")
    assert "terminus-2" not in result.said
    assert look("continuity", Forgetful(), "mix.harnesses=[terminus-2]").result == "ok"


def test_a_template_that_hides_answers_has_no_continuity() -> None:
    said = "every history would be rendered anew: plain text: sentinel lost"
    assert_refused(look("continuity", Blank()), said)
    assert look("continuity", Blank(), "harness.sampling.continuity=false").result == "skipped"


def test_raw_logprobs_are_refused() -> None:
    assert look("logprobs", FakeEngine()).result == "ok"
    assert_refused(look("logprobs", Raw()), "do not change with the temperature")


# --- trainer


def trained(gap: float, dtype: str = "float32") -> Result:
    """The check against a trainer whose first logprob is off by ``gap``."""

    def forward(prompt: Sequence[int], sampled: Sequence[int]) -> Forward:
        right = [logprob(position) for position in range(len(sampled))]
        assert len(sampled) == MORE
        return Forward([right[0] + gap, *right[1:]], dtype)

    engine = FakeEngine(answers=lambda prompt: Scripted("x" * 2 * MORE))
    with engine_thread(engine):
        return outcome("trainer", Grounds(settings(f"model.dtype={dtype}"), url=engine.url, forward=forward))


@pytest.mark.parametrize("dtype", GAPS)
def test_a_trainer_that_computes_the_same_passes(dtype: str) -> None:
    result = trained(0.9 * GAPS[dtype][0], dtype)
    assert result.result == "ok" and f"over {MORE} tokens in {dtype}" in result.said


@pytest.mark.parametrize("gap", [0.011, float("nan")])
def test_a_trainer_that_computes_something_else_is_refused(gap: float) -> None:
    assert_refused(trained(gap), "at most 0.01 and 0.002 are rounding")


def test_a_trainer_with_weights_of_another_type_is_refused() -> None:
    engine = FakeEngine(answers=lambda prompt: Scripted("x" * MORE))
    with engine_thread(engine):
        grounds = Grounds(settings(), url=engine.url, forward=lambda prompt, sampled: Forward([0.0], "bfloat16"))
        assert_refused(outcome("trainer", grounds), "but the trainer computes in bfloat16")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_forward_is_that_of_the_model(temperature: float) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).float().eval()
    prompt, sampled = [5, 6, 7, 8], [9, 10, 11]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + sampled])).logits[0] / temperature
    right = logits.log_softmax(-1)[range(3, 6), sampled]
    policy = PolicyModel(model, temperature)
    trainer = SimpleNamespace(
        policy=policy, engine=policy, device=torch.device("cpu"), training=SimpleNamespace(token_budget=64)
    )
    seen = forward_of(trainer, prompt, sampled)
    assert seen.dtype == "float32"
    assert np.linalg.norm(np.array(seen.logprobs) - right.numpy()) < 1e-4

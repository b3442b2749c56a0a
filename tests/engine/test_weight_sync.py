"""A real vLLM takes new weights, and its logprobs are then the new ones: idle, under way, and over a cached prefix.

"The output changed" is not a sufficient check: vLLM's CPU build can serve a new body with an old head. Each check
compares the logprobs of sampled tokens with a transformers forward pass over the same ids.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bench import gpu_engine
from bench.gpu_figures import Setting
from pipeline.config import AlgorithmConfig, EngineConfig, LoraConfig, ModelConfig, TrainingConfig
from pipeline.engine.server import SERVED_MODEL_NAME, EngineServer
from pipeline.engine.transfer import PHASES, FileTransfer, make_transfer, set_version
from pipeline.records import PolicyVersion, Row
from pipeline.training.batch import RowBatch, WeightedRow, collate
from pipeline.training.lora import adapter_weights
from pipeline.training.trainer import Trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 1e-4
PREFIX = [1 + (7 * i + i * i // 5) % 250 for i in range(600)]
LONG_CALL_TOKENS = 1200


@dataclass
class Policy:
    """One set of weights, as the trainer holds them and as transformers computes them."""

    directory: Path
    tensors: dict[str, torch.Tensor] = field(init=False)
    model: Any = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = load_file(self.directory / "model.safetensors")
        self.model = AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32).eval()

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """As a trainer lists them: the tied head is the embedding again."""
        return [*self.tensors.items(), ("lm_head.weight", self.tensors["model.embed_tokens.weight"])]

    @torch.no_grad()
    def errors(self, prompt: list[int], answer: dict[str, Any]) -> torch.Tensor:
        """|Δ| between the engine's and this policy's logprob of each sampled token."""
        ids = torch.tensor([prompt + answer["token_ids"]])
        logprobs = self.model(ids).logits[0].float().log_softmax(-1)[:-1]
        expected = logprobs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0]
        served = torch.tensor([token["logprob"] for token in answer["logprobs"]["content"]])
        return (expected - served).abs()

    def error(self, prompt: list[int], answer: dict[str, Any]) -> float:
        return float(self.errors(prompt, answer).max())


@dataclass
class Engine:
    """A running vLLM with two policies to switch between."""

    server: EngineServer
    old: Policy
    new: Policy
    scratch: Path
    pushes: int = 0

    def generate(self, prompt: list[int], tokens: int = 64, salt: str = "none") -> dict[str, Any]:
        body = {
            "model": SERVED_MODEL_NAME,
            "token_ids": prompt,
            "cache_salt": salt,
            "sampling_params": {"max_tokens": tokens, "logprobs": 0, "temperature": 1.0, "ignore_eos": True},
        }
        response = httpx.post(f"{self.server.url}/inference/v1/generate", json=body, timeout=120)
        assert response.status_code == 200, response.text
        answer = response.json()
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    def cached_tokens(self) -> float:
        """Prompt tokens that vLLM has taken from its prefix cache so far."""
        lines = httpx.get(f"{self.server.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))

    def push(self, kind: str, policy: Policy, before_resume: Callable[[], None] | None = None) -> PolicyVersion:
        self.pushes += 1
        version = PolicyVersion(0, self.pushes)
        transfer = make_transfer(kind, self.server.url, self.scratch, timeout_s=60)
        transfer.connect()
        timings = transfer.push(policy.named(), version, before_resume)
        transfer.close()
        assert tuple(timings.phases) == PHASES and min(timings.phases.values()) > 0
        assert 0 < timings.still_s < timings.total_s
        assert self.served_version() == str(version)
        return version

    @contextmanager
    def call_in_flight(self, kind: str) -> Iterator[tuple[PolicyVersion, Future[dict[str, Any]]]]:
        """A long call over PREFIX that runs on the old policy, with its version as the salt."""
        before = self.push(kind, self.old)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(self.generate, PREFIX, LONG_CALL_TOKENS, str(before))
            wait_until_running(self)
            yield before, call

    def served_version(self) -> str:
        return str(httpx.get(f"{self.server.url}/weight_info").json()["weight_version"])


@pytest.fixture(scope="module", params=["qwen3", "lfm2"])
def engine(
    request: pytest.FixtureRequest, checkpoint: Callable[[str, int], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    old, new = (Policy(checkpoint(request.param, seed)) for seed in (0, 1))
    place = tmp_path_factory.mktemp(request.param)
    model = ModelConfig(path=str(old.directory), max_model_len=2048)
    server = EngineServer(EngineConfig(weight_transfer="file"), model, place / "engine.log", place / "scratch")
    server.start(old.directory)
    try:
        server.wait_ready()
        server.warm_up()
        yield Engine(server, old, new, place / "weights")
    finally:
        server.close()


def report(what: str, error: float) -> float:
    print(f"{what}: max |Δ| = {error:.2e}")
    return error


def test_checkpoint_is_served_as_transformers_computes_it(engine: Engine) -> None:
    if engine.pushes == 0:
        assert report("loaded from disk", engine.old.error(PREFIX[:40], engine.generate(PREFIX[:40]))) < TOLERANCE
    set_version(engine.server.url, PolicyVersion(3, 9))
    assert engine.served_version() == "3.9"


@pytest.mark.parametrize("kind", ["file", "gloo"])
def test_idle_sync(engine: Engine, kind: str) -> None:
    for policy in (engine.old, engine.new, engine.old):
        version = engine.push(kind, policy)
        answer = engine.generate(PREFIX[:40], tokens=128, salt=str(version))
        assert report(f"{kind}, idle", policy.error(PREFIX[:40], answer)) < TOLERANCE
    assert engine.new.error(PREFIX[:40], answer) > 0.1  # the two policies can be told apart


@pytest.mark.parametrize("kind", ["file", "gloo"])
def test_sync_with_a_call_in_flight(engine: Engine, kind: str) -> None:
    with engine.call_in_flight(kind) as (before, in_flight):
        salted: list[bool] = []
        after = engine.push(kind, engine.new, before_resume=lambda: salted.append(in_flight.done()))
        calls = [([*PREFIX, 8, 9], str(after)), ([*PREFIX, 5, 6], str(before))]
        answers = [engine.generate(prompt, salt=salt) for prompt, salt in calls]
        finished = in_flight.result(timeout=120)

    assert salted == [False]
    for (prompt, _), answer, salt in zip(calls, answers, ("new", "old"), strict=True):
        assert report(f"{kind}, in flight, {salt} salt", engine.new.error(prompt, answer)) < TOLERANCE

    assert finished["finish_reason"] == "length"
    assert len(finished["token_ids"]) == LONG_CALL_TOKENS
    assert [span["version"] for span in finished["weight_versions"]] == [str(before), str(after)]
    boundary = finished["weight_versions"][0]["end"]
    assert 0 < boundary < LONG_CALL_TOKENS
    for what, policy, part in (
        ("before", engine.old, slice(0, boundary)),
        ("after", engine.new, slice(boundary, None)),
    ):
        error = float(policy.errors(PREFIX, finished)[part].max())
        assert report(f"{kind}, the call in flight, tokens {what} the sync", error) < TOLERANCE


def test_the_blocks_with_adapters_are_all_that_must_travel(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On top of the base model; then from one version of the adapter to the next."""
    engine.push("file", engine.old)
    # a part of a matrix that vLLM fuses; a part of a convolution
    target = {"qwen3": "v_proj", "lfm2": "in_proj"}[engine.old.model.config.model_type]
    settings = TrainingConfig(lora=LoraConfig(rank=4, targets=[target]))
    trainer = Trainer(engine.old.directory, settings, AlgorithmConfig(), seed=0, total_updates=1)
    for seed in (1, 2):
        torch.manual_seed(seed)
        for weight in adapter_weights(trainer.policy.model):
            torch.nn.init.normal_(weight.base, std=0.1)
        merged = list(trainer.named_weights())
        assert 0 < len(merged) < len(engine.old.tensors)
        monkeypatch.setattr(engine.new, "named", lambda merged=merged: merged)
        version = engine.push("file", engine.new)
        answer = engine.generate(PREFIX[:40], tokens=64, salt=str(version))
        assert report("adapter", trainer_error(trainer, PREFIX[:40], answer)) < TOLERANCE
        assert engine.old.error(PREFIX[:40], answer) > 0.1


@torch.no_grad()
def trainer_error(trainer: Trainer, prompt: list[int], answer: dict[str, Any]) -> float:
    """max |Δ| between the engine's logprobs and those of the trainer's own forward, whose adapters are not merged."""
    ids = np.array([*prompt, *answer["token_ids"]], dtype=np.int32)
    served = np.array([token["logprob"] for token in answer["logprobs"]["content"]], dtype=np.float32)
    row = Row(ids, np.arange(len(ids)) >= len(prompt), np.concatenate([np.zeros(len(prompt), np.float32), served]))
    micro = collate(RowBatch((WeightedRow(row, 1.0, 1.0, True, "r", 0),), trainer.policy.packs, len(ids)))
    return float((trainer.policy(micro)[0] - micro.behaviour).abs().max())


def test_the_smoke_test_of_a_gpu_compares_engine_and_trainer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine step as it stands, on this engine: an adapter of all linear layers, then a trained policy."""
    monkeypatch.setattr(gpu_engine, "SAMPLED_TOKENS", 32)
    engine.push("file", engine.old)
    setting = Setting(torch.device("cpu"), torch.float32, engine.scratch)
    figures = gpu_engine.compare(setting, engine.old.directory, engine.server.url)
    for figure in figures:
        print(f"{figure.name}: {figure.value:.3g} {figure.unit}, limit {figure.limit}")
    assert all(figure.holds for figure in figures)
    assert sum(figure.limit is not None for figure in figures) == 3
    arrived = [figure.value for figure in figures if "had nothing arrived" in figure.name]
    assert len(arrived) == 2 and min(arrived) > 1000 * gpu_engine.MEAN_GAP[torch.float32]


class ForgetfulTransfer(FileTransfer):
    """Leaves the keys and values of the old weights in place while the weights change."""

    def _pause(self) -> None:
        self._post("pause", params={"mode": "keep", "clear_cache": False})


def test_only_the_salt_keeps_new_calls_off_a_cache_that_was_not_cleared(engine: Engine) -> None:
    """Shows that the checks above have teeth, and that the salt alone would do."""
    with engine.call_in_flight("file") as (before, in_flight):
        version = PolicyVersion(0, engine.pushes + 1)
        transfer = ForgetfulTransfer(engine.server.url, engine.scratch, 60)
        transfer.connect()
        transfer.push(engine.new.named(), version)
        assert not in_flight.done(), "the call in flight ended too early: vLLM could drop its blocks"
        cached = engine.cached_tokens()
        fresh = engine.generate([*PREFIX, 8, 9], salt=str(version))
        cached_by_fresh = engine.cached_tokens() - cached
        stale = engine.generate([*PREFIX, 5, 6], salt=str(before))
        cached_by_stale = engine.cached_tokens() - cached - cached_by_fresh
    print(f"from the cache: {cached_by_fresh} tokens with the new salt, {cached_by_stale} with the old one")
    assert cached_by_fresh == 0
    assert report("not cleared, new salt", engine.new.error([*PREFIX, 8, 9], fresh)) < TOLERANCE
    assert cached_by_stale > 0
    assert report("not cleared, old salt", engine.new.error([*PREFIX, 5, 6], stale)) > 100 * TOLERANCE


def wait_until_running(engine: Engine, deadline_s: float = 60) -> None:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        lines = httpx.get(f"{engine.server.url}/metrics").text.splitlines()
        if any(line.startswith("vllm:num_requests_running") and float(line.split()[-1]) >= 1 for line in lines):
            return
        threading.Event().wait(0.05)
    raise AssertionError(f"no call was running after {deadline_s} s")

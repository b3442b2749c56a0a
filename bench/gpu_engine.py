"""The engine step of `make gpu-smoke`: do engine and trainer agree, before and after new weights, on one device?

A real vLLM samples; the trainer computes the same tokens; then an adapter's merged blocks are pushed, then all weights
of a trained policy, and they must agree as well as before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import torch
from torch import Tensor

from bench.gpu_figures import Figure, Setting
from bench.groups import group_of
from pipeline.config import AlgorithmConfig, EngineConfig, LoraConfig, ModelConfig, TrainingConfig, UserError
from pipeline.engine.device import on_gpu
from pipeline.engine.server import SERVED_MODEL_NAME, EngineServer
from pipeline.engine.transfer import make_transfer
from pipeline.records import PolicyVersion, Row
from pipeline.training.batch import RowBatch, WeightedRow, collate
from pipeline.training.lora import adapter_weights
from pipeline.training.trainer import Trainer

PROMPTS, PROMPT_TOKENS, SAMPLED_TOKENS = 4, 64, 128
MAX_MODEL_LEN = 2048
GPU_SHARE = 0.3  # of the device's memory, for vLLM; the rest is the trainer's
MEAN_GAP = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # between bf16 of vLLM and of transformers on a CPU it was 0.025
STEP = 0.1  # learning rate as a share of the embedding's mean size: one step must change the policy visibly
PUSH_S = 120.0


@dataclass(frozen=True)
class Gap:
    """Engine against trainer over sampled tokens: mean and largest |Δ|, and the KL estimate that runs report."""

    mean: float
    largest: float
    kl: float

    @classmethod
    def of(cls, trainer: Trainer, samples: Sequence[Row]) -> Gap:
        deltas = torch.cat([_difference(trainer, row) for row in samples])
        return cls(float(deltas.abs().mean()), float(deltas.abs().max()), float((deltas.exp() - 1 - deltas).mean()))

    def figures(self, when: str, limit: float | None) -> list[Figure]:
        return [
            Figure(f"{when}: engine against trainer, mean |Δ logprob|", self.mean, "", limit),
            Figure(f"{when}: engine against trainer, largest |Δ logprob|", self.largest, ""),
            Figure(f"{when}: mismatch_kl", self.kl, ""),
        ]


@torch.no_grad()
def _difference(trainer: Trainer, row: Row) -> Tensor:
    batch = RowBatch((WeightedRow(row, 1.0, 1.0, True, "rollout", 0),), trainer.policy.packs, len(row.input_ids))
    micro = collate(batch).to(trainer.device)
    return (trainer.policy(micro)[0] - micro.behaviour).float().cpu()


def engine(setting: Setting, kind: str, path: Path) -> list[Figure]:
    """Start a vLLM on the device and compare. Raises UserError where vLLM is the CPU's build."""
    if setting.device.type == "cuda" and not on_gpu():
        raise UserError("the installed vLLM is the CPU build: on a GPU node, pip install -e .[cuda] (docs/install.md)")
    with served(setting, kind, path) as url:
        return compare(setting, path, url)


@contextmanager
def served(setting: Setting, kind: str, path: Path) -> Iterator[str]:
    """The url of a vLLM that serves ``path``."""
    share = ["--gpu-memory-utilization", str(GPU_SHARE)] if setting.device.type == "cuda" else []
    config = EngineConfig(weight_transfer=setting.transfer, extra_args=share)
    name = str(setting.dtype).removeprefix("torch.")
    model = ModelConfig(path=str(path), max_model_len=MAX_MODEL_LEN, dtype=name)
    server = EngineServer(config, model, setting.scratch / f"engine-{kind}.log", setting.scratch / "vllm")
    server.start(path)
    try:
        server.wait_ready()
        yield server.url
    finally:
        server.close()


def compare(setting: Setting, path: Path, url: str) -> list[Figure]:
    """Loaded from disk; with an adapter; with every weight trained. ``url`` serves the weights in ``path``."""
    limit = MEAN_GAP[setting.dtype]
    adapted = _trainer(path, TrainingConfig(lora=LoraConfig(rank=8)))
    before = sample(url, adapted.policy.model.config.vocab_size, "disk")
    figures = Gap.of(adapted, before).figures("loaded from disk", limit)
    _shake(adapted)
    figures += synced(setting, adapted, url, before, PolicyVersion(0, 1), "an adapter's merged blocks")
    size = float(adapted.policy.model.get_input_embeddings().weight.abs().mean())
    trainer = _trainer(path, TrainingConfig(learning_rate=STEP * size, decay_fraction=0.0))
    halves = [1.0 if index < len(before) / 2 else -1.0 for index in range(len(before))]
    trainer.update([group_of("g", before, halves)])
    return figures + synced(setting, trainer, url, before, PolicyVersion(0, 2), "all weights")


def _trainer(path: Path, training: TrainingConfig) -> Trainer:
    return Trainer(path, training, AlgorithmConfig(minibatches=1), seed=0, total_updates=1)


@torch.no_grad()
def _shake(trainer: Trainer) -> None:
    """Give the adapters random values, as if they had been trained for long."""
    for weight in adapter_weights(trainer.policy.model):
        torch.nn.init.normal_(weight.base, std=weight.base.shape[-1] ** -0.5)


def synced(
    setting: Setting, trainer: Trainer, url: str, before: Sequence[Row], version: PolicyVersion, what: str
) -> list[Figure]:
    """Push, sample anew, compare. The old samples show how far off an engine with the old weights would be."""
    stale = Gap.of(trainer, before)
    weights = list(trainer.named_weights())
    transfer = make_transfer(setting.transfer, url, setting.scratch / "weights", PUSH_S)
    try:
        transfer.connect()
        started = time.perf_counter()
        transfer.push(weights, version)
        seconds = time.perf_counter() - started
    finally:
        transfer.close()
    samples = sample(url, trainer.policy.model.config.vocab_size, str(version))
    limit = min(MEAN_GAP[setting.dtype], stale.mean / 4)
    sent = sum(value.numel() * value.element_size() for _, value in weights) / 2**20
    return [
        *Gap.of(trainer, samples).figures(f"after a sync of {what}", limit),
        Figure(f"{what}: what the mean would be had nothing arrived", stale.mean, ""),
        Figure(f"{what}: pushed by {setting.transfer}", sent, "MiB"),
        Figure(f"{what}: the whole push", seconds, "s"),
    ]


def sample(url: str, vocabulary: int, salt: str) -> list[Row]:
    """Sampled tokens with the engine's logprobs, as rows."""
    rng = np.random.default_rng(0)
    return [_sample_one(url, rng.integers(5, min(vocabulary, 300), PROMPT_TOKENS), salt) for _ in range(PROMPTS)]


def _sample_one(url: str, prompt: np.ndarray, salt: str) -> Row:
    sampling = {
        "max_tokens": SAMPLED_TOKENS,
        "logprobs": 0,
        "temperature": 1.0,
        "ignore_eos": True,
        "detokenize": False,
    }
    body = {"model": SERVED_MODEL_NAME, "token_ids": prompt.tolist(), "cache_salt": salt, "sampling_params": sampling}
    response = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=PUSH_S, trust_env=False)
    if response.status_code != httpx.codes.OK:
        raise RuntimeError(f"the engine answered {response.status_code}: {response.text[:300]}")
    answer = json.loads(response.text)["choices"][0]
    ids = np.array([*prompt, *answer["token_ids"]], dtype=np.int32)
    logprobs = np.zeros(len(ids), np.float32)
    logprobs[len(prompt) :] = [token["logprob"] for token in answer["logprobs"]["content"]]
    return Row(ids, np.arange(len(ids)) >= len(prompt), logprobs)

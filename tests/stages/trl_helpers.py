"""TRL on a CPU: an attention in the place of its GPU kernel, a small model, and rollouts that take no time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from pipeline.cli import compose_config
from pipeline.config import Config
from pipeline.records import GroupSpec, Outcome, PolicyVersion, RolloutRecord, Row, Verdict
from pipeline.stages.trl_worker import YokeRolloutWorker
from pipeline.tasks.generate import generate_tasks
from pipeline.tasks.harbor import load_tasks

torch.set_num_threads(1)  # two fight over a busy machine
VOCABULARY = 1010  # the scripted engine's ids fit in


def attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, *lengths: Any,
    softmax_scale: float, **options: Any,
) -> Tensor:  # fmt: skip
    """What TRL asks of FlashAttention: each segment of queries [tokens, heads, width] sees the end of its own keys."""
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for number in range(len(starts) - 1):
        own = query[starts[number] : starts[number + 1]].transpose(0, 1)
        span = slice(int(key_starts[number]), int(key_starts[number + 1]))
        keys, values = (part[span].repeat_interleave(groups, 1).transpose(0, 1) for part in (key, value))
        above = keys.shape[1] - own.shape[1]
        seen = torch.ones(own.shape[1], keys.shape[1], dtype=torch.bool).tril(above) if above else None
        part = F.scaled_dot_product_attention(own, keys, values, seen, is_causal=not above, scale=softmax_scale)
        outputs.append(part)
    return torch.cat(outputs, 1).transpose(0, 1)


def trl_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's two calls for a GPU, answered without one."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=attention))
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *words: None)


@contextmanager
def accelerate_of_its_own() -> Iterator[None]:
    """TRL's data set logs, which takes accelerate's state of this process; later tests get none of it."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    PartialState(cpu=True)
    try:
        yield
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def tiny_qwen3() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.3, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).float()


def save_tiny(place: Path) -> Path:
    tiny_qwen3().save_pretrained(place)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1").save_pretrained(place)
    return place


def settings(place: Path, *overrides: str) -> Config:
    """Groups of 4, of which 4 may be outstanding."""
    known = ("algorithm.group_size=4", "algorithm.max_outstanding_rollouts=16", "concurrency=16")
    return compose_config([f"run_dir={place / 'run'}", *known, *overrides])


Script = Callable[[GroupSpec, int], float | None]  # a rollout's correctness; None: the infrastructure failed


class Rollouts:
    """In the place of a Workshop and its proxy. Rollout i of a group has i + 1 rows."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.supervisor = self
        self.version = PolicyVersion(0, 0)
        self.begun = 0
        self.open = 0
        self.hold: asyncio.Event | None = None

    async def set_policy_version(self, version: PolicyVersion, deadline_s: float = 30.0) -> None:
        self.version = version

    async def roll_out(self, spec: GroupSpec, index: int) -> RolloutRecord:
        self.begun += 1
        self.open += 1
        version = self.version
        try:
            await (self.hold.wait() if self.hold else asyncio.sleep(0))
            return rollout(spec, index, self.script(spec, index), version)
        finally:
            self.open -= 1


def rollout(spec: GroupSpec, index: int, correctness: float | None, version: PolicyVersion) -> RolloutRecord:
    rng = np.random.default_rng([int(spec.group_id[1:]), index])
    outcome = Outcome.INFRASTRUCTURE if correctness is None else Outcome.UNSOLVED
    verdict = Verdict(None, correctness, 1, "" if correctness is not None else "the engine did not answer")
    return RolloutRecord(
        f"{spec.group_id}-{index}", spec.group_id, index, spec.task.task_id, spec.harness, outcome, verdict,
        tuple(row(rng) for _ in range(index + 1)), version, version, 1, 0, 0, 1, 1, 1.0,
    )  # fmt: skip


def row(rng: np.random.Generator, trained: int = 4) -> Row:
    """A context of 6 tokens with a sampled but masked one in it, then ``trained`` sampled ones."""
    ids = rng.integers(2, VOCABULARY, 6 + trained).astype(np.int32)
    mask = np.arange(len(ids)) >= 6
    sampled = mask | (np.arange(len(ids)) == 3)
    return Row(ids, mask, np.where(sampled, -1 - rng.random(len(ids)), 0).astype(np.float32))


class Worker(YokeRolloutWorker):
    """Without vLLM, proxy and sandboxes."""

    def __init__(self, place: Path, script: Script, *overrides: str, **more: Any) -> None:
        tasks = load_tasks(generate_tasks(place / "tasks", "train", 3, 0))
        super().__init__(settings(place, *overrides), tasks, "http://127.0.0.1:9", **more)
        self.rollouts = Rollouts(script)
        self.trouble: Exception | None = None

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Any]:
        if self.trouble:
            raise self.trouble
        yield self.rollouts

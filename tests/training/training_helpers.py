"""Tiny models on disk and random groups for the trainer's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pipeline.config import TrainingConfig
from pipeline.records import Outcome, PolicyVersion, RolloutRecord, Row, TrainGroup, Verdict
from pipeline.training import deepspeed_engine
from pipeline.training.trainer import Trainer

VOCABULARY = 97
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def qwen3(seed: int = 0) -> PreTrainedModel:
    """Pure attention, grouped heads, a tied head."""
    torch.manual_seed(seed)
    config = Qwen3Config(**SHAPE, num_hidden_layers=2, head_dim=8, tie_word_embeddings=True)
    return Qwen3ForCausalLM(config).float()


def lfm2(seed: int = 0) -> PreTrainedModel:
    """A hybrid: short convolutions beside attention."""
    torch.manual_seed(seed)
    layers = ["conv", "full_attention", "conv"]
    config = Lfm2Config(**SHAPE, num_hidden_layers=3, layer_types=layers, block_auto_adjust_ff_dim=False)
    return Lfm2ForCausalLM(config).float()


def qwen3_5(seed: int = 0) -> PreTrainedModel:
    """A hybrid: linear attention (a recurrent state and a short convolution) beside attention."""
    torch.manual_seed(seed)
    layers = ["linear_attention", "full_attention", "linear_attention"]
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    linear |= {"linear_value_head_dim": 8, "head_dim": 8}
    config = Qwen3_5TextConfig(**SHAPE, **linear, num_hidden_layers=3, layer_types=layers)
    return Qwen3_5ForCausalLM(config).float()


MODELS: dict[str, Callable[[int], PreTrainedModel]] = {"qwen3": qwen3, "lfm2": lfm2, "qwen3_5": qwen3_5}


def save_model(path: Path, kind: str = "qwen3") -> Path:
    """A checkpoint directory with tokenizer, template and generation config."""
    vocabulary = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", bos_token="w1", eos_token="w2")
    fast.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    MODELS[kind](0).save_pretrained(path)
    fast.save_pretrained(path)
    return path


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """A copy of each parameter."""
    return {name: value.clone() for name, value in trainer.named_weights()}


def partition_all() -> None:
    """Let ZeRO-3 gather each parameter when it is used: it would keep such tiny ones gathered for good."""
    usual = deepspeed_engine.deepspeed_config

    def config(training: TrainingConfig, half: bool) -> dict[str, Any]:
        made = usual(training, half)
        made["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return made

    deepspeed_engine.deepspeed_config = config


def random_row(rng: np.random.Generator, prefix: np.ndarray, length: int) -> Row:
    """``prefix`` and ``length`` more tokens, about half of them trained, in spans."""
    tail = rng.integers(3, VOCABULARY, length)
    mask = np.concatenate([np.zeros(len(prefix), bool), rng.random(length) < 0.5])
    mask[-1] = True
    mask[0] = False
    logprobs = np.where(mask, -2 - 2 * rng.random(len(mask)), 0).astype(np.float32)
    return Row(np.concatenate([prefix, tail]).astype(np.int32), mask, logprobs)


def rollout(rollout_id: str, rows: tuple[Row, ...], version: PolicyVersion = PolicyVersion(0, 0)) -> RolloutRecord:
    """A graded rollout around ``rows``."""
    return RolloutRecord(
        rollout_id=rollout_id,
        group_id=rollout_id.split("/")[0],
        index=0,
        task_id="task",
        harness="pi",
        outcome=Outcome.SOLVED,
        verdict=Verdict(1.0, 1.0, 1),
        rows=rows,
        version=version,
        newest_version=version,
        calls=1,
        malformed=0,
        undelivered=0,
        prompt_tokens=1,
        sampled_tokens=1,
        wall_s=1.0,
    )


def random_groups(seed: int, groups: int = 3, size: int = 4, prefix: int = 12, longest: int = 9) -> list[TrainGroup]:
    """Groups over two harness prefixes, a task prefix each, rollouts of one to three rows."""
    rng = np.random.default_rng(seed)
    harness = [rng.integers(3, VOCABULARY, prefix), rng.integers(3, VOCABULARY, prefix // 2)]
    made = []
    for number in range(groups):
        shared = np.concatenate([harness[number % 2], rng.integers(3, VOCABULARY, 3)])
        rollouts = []
        for index in range(size):
            rows = tuple(random_row(rng, shared, int(rng.integers(1, longest))) for _ in range(rng.integers(1, 4)))
            rollouts.append(rollout(f"g{number}/{index}", rows))
        advantages = rng.normal(size=size)
        made.append(TrainGroup(f"g{number}", "pi", tuple(rollouts), tuple(advantages - advantages.mean())))
    return made


def token_logprobs(model: torch.nn.Module, row: Row) -> torch.Tensor:
    """Of the trained tokens, by a plain forward over the row."""
    ids = torch.from_numpy(row.input_ids.astype(np.int64))
    scores = model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return scores.gather(1, ids[1:, None])[:, 0][torch.from_numpy(row.loss_mask[1:])]


def add_plain_gradients(model: torch.nn.Module, groups: Sequence[TrainGroup]) -> None:
    """Those of one step of GRPO with group_mean and a clip of 0.2, row by row."""
    n = sum(len(group.rollouts) for group in groups)
    for group in groups:
        mean = sum(row.loss_mask.sum() for member in group.rollouts for row in member.rows) / len(group.rollouts)
        for member, advantage in zip(group.rollouts, group.advantages, strict=True):
            for row in member.rows:
                ratio = (token_logprobs(model, row) - torch.from_numpy(row.logprobs[row.loss_mask])).exp()
                surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                (-surrogate.sum() / (n * mean)).backward()

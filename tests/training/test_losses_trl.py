"""PPO-clip with token_mean is the loss of TRL's AsyncGRPOTrainer: its own code, on the same tokens."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loss_reference import Gradients, policy
from training_helpers import random_groups

from pipeline.config import AlgorithmConfig
from pipeline.records import TrainGroup
from pipeline.training.batch import collate, make_minibatch, plan
from pipeline.training.loss import LOSSES
from pipeline.training.loss_inputs import loss_inputs

LOW, HIGH = 0.2, 0.28
OURS_AND_TRLS = {
    "ratio/mean": "ratio",
    "mismatch_kl": "kl",
    "entropy": "entropy",
    "clip_ratio/low_mean": "clip_ratio/low_mean",
    "clip_ratio/high_mean": "clip_ratio/high_mean",
    "clip_ratio/region_mean": "clip_ratio/region_mean",
}


class OneProcess:
    """What compute_loss asks of accelerate."""

    num_processes = 1

    def reduce(self, value: torch.Tensor, reduction: str) -> torch.Tensor:
        return value

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        return value


def trl_loss(logprobs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, entropy: torch.Tensor):
    """TRL's loss of these tokens as one micro-batch, and its metrics."""
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    count = len(logprobs)
    numbers = torch.arange(count)[None]
    inputs = {name: numbers for name in ("input_ids", "position_ids", "shift_labels", "token_index")}
    inputs |= {"attention_mask": torch.ones(1, count), "segment_id": 0 * numbers}
    inputs |= {"old_log_probs": behaviour[None], "advantages": advantages[None]}
    inputs |= {name: -1 - 0 * numbers for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    inputs |= {"tree_max_seqlens": torch.ones(1, 2)}
    inputs |= {name: torch.tensor([count]) for name in ("global_n_tokens", "global_n_forward_tokens", "mean_seq_len")}
    trainer = SimpleNamespace(
        epsilon_low=LOW,
        epsilon_high=HIGH,
        accelerator=OneProcess(),
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list)},
        _step_forward_tokens=0,
        _step_trained_tokens=0,
        _step_seq_len_weighted=0,
        _step_samples=0,
        _step_forward_s=0,
    )
    answer = SimpleNamespace(log_probs=logprobs, entropy=entropy)
    loss = AsyncGRPOTrainer.compute_loss(trainer, lambda **_: answer, inputs)
    return loss, {name: values[0] for name, values in trainer._metrics["train"].items()}


def our_loss(groups: list[TrainGroup]) -> tuple[float, Gradients, dict[str, float]]:
    """Ours in many micro-batches; gradients by what the policy, the sampler and the advantage say of a token."""
    algorithm = AlgorithmConfig(aggregation="token_mean", clip_low=LOW, clip_high=HIGH)
    loss, gradients, sums = 0.0, {}, defaultdict(float)
    for batch in plan(make_minibatch(groups, algorithm, None).rows, 60, True)[0]:
        micro = collate(batch)
        logprobs = torch.from_numpy(
            np.concatenate([policy(row.row.input_ids)[row.row.loss_mask] for row in batch.rows])
        ).requires_grad_()
        inputs = loss_inputs(micro, logprobs, -logprobs.detach(), algorithm)
        outputs = LOSSES["ppo_clip"](inputs, LOW, HIGH)
        outputs.loss.backward()
        assert logprobs.grad is not None
        loss += outputs.loss.item()
        for name, value in outputs.sums.items():
            sums[name] += value
        values = (logprobs.tolist(), micro.behaviour.tolist(), micro.advantages.tolist(), logprobs.grad.tolist())
        gradients |= {key: gradient for *key_parts, gradient in zip(*values, strict=True) for key in [tuple(key_parts)]}
    return loss, gradients, {name: sums[ours] / sums["tokens"] for ours, name in OURS_AND_TRLS.items()}


@pytest.mark.slow
def test_ppo_clip_with_token_mean_equals_trl() -> None:
    groups = random_groups(3)
    torch.set_default_dtype(torch.float64)
    try:
        loss, gradients, metrics = our_loss(groups)
    finally:
        torch.set_default_dtype(torch.float32)  # TRL counts clipped tokens in it
    keys = list(gradients)
    columns = (torch.tensor(column, dtype=torch.float64) for column in zip(*keys, strict=True))
    logprobs, behaviour, advantages = columns
    expected, theirs = trl_loss(logprobs.requires_grad_(), behaviour, advantages, -logprobs.detach())
    expected.backward()
    assert len(keys) == sum(row.trained_tokens for g in groups for member in g.rollouts for row in member.rows)
    assert loss == pytest.approx(expected.item(), rel=1e-9)
    assert logprobs.grad is not None
    assert [gradients[key] for key in keys] == pytest.approx(logprobs.grad.tolist(), rel=1e-9)
    assert metrics == pytest.approx({name: theirs[name] for name in metrics}, rel=1e-6)
    assert metrics["clip_ratio/low_mean"] > 0 < metrics["clip_ratio/high_mean"]

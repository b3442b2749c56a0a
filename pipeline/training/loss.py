"""The policy-gradient loss over trained tokens, and the weights that make it harness-neutral.

Every denominator is counted once per optimizer step from the records and travels with each row as one number, so how
rollouts are cut into rows, micro-batches or ranks cannot change the loss. No KL term, value function or entropy bonus.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pipeline.config import AlgorithmConfig, UserError
from pipeline.records import RolloutRecord, TrainGroup

LOG_RATIO_LIMIT = 20.0  # exp() stays finite in float32; a token this far off the behaviour policy is clipped anyway
NO_VALUE = float("-inf")  # the maximum over nothing


@dataclass(frozen=True)
class LossInputs:
    """The trained tokens of one micro-batch, flattened.

    ``logprobs`` are the trainer's and carry gradients; ``behaviour`` those the engine sampled with; ``weights`` hold
    all that normalises (see ``token_weights``). ``entropy`` is detached and only reported. ``comparable`` marks tokens
    that the trainer's own weights sampled, where the two logprobs should agree.
    """

    logprobs: Float[Tensor, "tokens"]
    behaviour: Float[Tensor, "tokens"]
    advantages: Float[Tensor, "tokens"]
    weights: Float[Tensor, "tokens"]
    entropy: Float[Tensor, "tokens"]
    comparable: Bool[Tensor, "tokens"]


@dataclass(frozen=True)
class LossOutputs:
    """``loss`` is this micro-batch's part of the step's loss: parts add up, ``sums`` too; ``maxima`` do not."""

    loss: Float[Tensor, ""]
    sums: dict[str, float]
    maxima: dict[str, float]


def ppo_clip(inputs: LossInputs, clip_low: float, clip_high: float) -> LossOutputs:
    """PPO-clip (arXiv 1707.06347, eq. 7) on the behaviour ratio r = π/μ: −Σ w·min(rA, clip(r, 1−low, 1+high)·A)."""
    log_ratio = (inputs.logprobs - inputs.behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
    loss = -(inputs.weights * objective).sum()
    low = (ratio < 1 - clip_low) & (inputs.advantages < 0)
    high = (ratio > 1 + clip_high) & (inputs.advantages > 0)
    sums = {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high}
    return LossOutputs(loss, _sums(inputs, ratio, sums), _maxima(inputs, ratio))


def _sums(inputs: LossInputs, ratio: Tensor, extra: dict[str, Tensor]) -> dict[str, float]:
    """Sums over tokens; ``mismatch_kl`` is the k3 estimate of KL(μ‖π), r − 1 − log r, which is never negative."""
    ratio = ratio.detach().double()
    values = {"entropy": inputs.entropy, "ratio/mean": ratio, "mismatch_kl": ratio - 1 - ratio.log(), **extra}
    return {"tokens": float(ratio.numel())} | {name: float(value.double().sum()) for name, value in values.items()}


def _maxima(inputs: LossInputs, ratio: Tensor) -> dict[str, float]:
    difference = (inputs.logprobs - inputs.behaviour).detach().abs()[inputs.comparable]
    return {"ratio/max": _max(ratio.detach()), "logprob_diff_max": _max(difference)}


def _max(values: Tensor) -> float:
    return float(values.max()) if values.numel() else NO_VALUE


LOSSES: dict[str, Callable[[LossInputs, float, float], LossOutputs]] = {"ppo_clip": ppo_clip}


def trained_tokens(rollout: RolloutRecord) -> int:
    """T_i: supervised tokens of a rollout over all of its rows."""
    return sum(row.trained_tokens for row in rollout.rows)


def group_mean(groups: Sequence[TrainGroup], algorithm: AlgorithmConfig) -> list[list[float]]:
    """w = 1/(N·T̄_g): every group weighs by its rollouts, and inside a group all tokens weigh the same."""
    rollouts = _count(groups)
    return [[_inverse(rollouts * _mean_tokens(group))] * len(group.rollouts) for group in groups]


def rollout_mean(groups: Sequence[TrainGroup], algorithm: AlgorithmConfig) -> list[list[float]]:
    """w = 1/(N·T_i): every rollout weighs the same, so a token of a long one weighs less."""
    rollouts = _count(groups)
    return [[_inverse(rollouts * trained_tokens(rollout)) for rollout in group.rollouts] for group in groups]


def token_mean(groups: Sequence[TrainGroup], algorithm: AlgorithmConfig) -> list[list[float]]:
    """w = 1/ΣT: every token weighs the same (TRL, DAPO arXiv 2503.14476)."""
    tokens = sum(trained_tokens(rollout) for group in groups for rollout in group.rollouts)
    return [[_inverse(tokens)] * len(group.rollouts) for group in groups]


def constant(groups: Sequence[TrainGroup], algorithm: AlgorithmConfig) -> list[list[float]]:
    """w = 1/(N·constant_tokens): no length in the denominator (Dr.GRPO, arXiv 2503.20783)."""
    weight = 1.0 / (_count(groups) * algorithm.constant_tokens)
    return [[weight] * len(group.rollouts) for group in groups]


AGGREGATIONS: dict[str, Callable[[Sequence[TrainGroup], AlgorithmConfig], list[list[float]]]] = {
    "group_mean": group_mean,
    "rollout_mean": rollout_mean,
    "token_mean": token_mean,
    "constant": constant,
}


def token_weights(groups: Sequence[TrainGroup], algorithm: AlgorithmConfig) -> list[list[float]]:
    """The weight of one token of each rollout, [group][rollout], for the groups of one optimizer step."""
    return AGGREGATIONS[algorithm.aggregation](groups, algorithm)


def check_algorithm(algorithm: AlgorithmConfig) -> None:
    """Refuse, with a UserError, a loss, an aggregation or a number that this room does not know."""
    _check_name("algorithm.loss", algorithm.loss, LOSSES)
    _check_name("algorithm.aggregation", algorithm.aggregation, AGGREGATIONS)
    if not (0 < algorithm.clip_low < 1 and algorithm.clip_high > 0):
        raise UserError(
            f"algorithm.clip_low={algorithm.clip_low} must lie in (0, 1), "
            f"algorithm.clip_high={algorithm.clip_high} above 0"
        )
    if algorithm.minibatches < 1 or algorithm.constant_tokens < 1:
        raise UserError("algorithm.minibatches and algorithm.constant_tokens must be at least 1")


def _check_name(knob: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise UserError(f"{knob}={value} is not known; choose one of {', '.join(sorted(known))}")


def _count(groups: Sequence[TrainGroup]) -> int:
    return sum(len(group.rollouts) for group in groups)


def _mean_tokens(group: TrainGroup) -> float:
    return sum(trained_tokens(rollout) for rollout in group.rollouts) / len(group.rollouts)


def _inverse(value: float) -> float:
    """1/value; 0 where there is nothing to weigh (a rollout or a group without a trained token)."""
    return 1.0 / value if value else 0.0

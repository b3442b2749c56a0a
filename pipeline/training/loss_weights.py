"""How much one trained token of each rollout weighs in the loss: the weights that make it harness-neutral.

Every denominator is counted once per optimizer step from the records, before anything is masked, and travels with each
row as one number, so how rollouts are cut into rows, micro-batches or ranks cannot change the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeline.config import AlgorithmConfig
from pipeline.records import RolloutRecord, TrainGroup


def trained_tokens(rollout: RolloutRecord) -> int:
    """T_i: supervised tokens of a rollout over all of its rows."""
    return sum(row.trained_tokens for row in rollout.rows)


def group_mean(groups: Sequence[TrainGroup], algorithm: AlgorithmConfig) -> list[list[float]]:
    """w = 1/(N·T̄_g): every group weighs by its rollouts, and inside a group all tokens weigh the same."""
    rollouts = _count(groups)
    return [[_inverse(rollouts * _mean_tokens(group))] * len(group.rollouts) for group in groups]


def rollout_mean(groups: Sequence[TrainGroup], algorithm: AlgorithmConfig) -> list[list[float]]:
    """w = 1/(N·T_i): every rollout weighs the same, so a token of a long one weighs less (GRPO, arXiv 2402.03300)."""
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


def _count(groups: Sequence[TrainGroup]) -> int:
    return sum(len(group.rollouts) for group in groups)


def _mean_tokens(group: TrainGroup) -> float:
    return sum(trained_tokens(rollout) for rollout in group.rollouts) / len(group.rollouts)


def _inverse(value: float) -> float:
    """1/value; 0 where there is nothing to weigh (a rollout or a group without a trained token)."""
    return 1.0 / value if value else 0.0

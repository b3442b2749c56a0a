"""What a loss knows of one micro-batch beside its forward: the policy before the update and before the step.

A snapshot is one forward without gradients over a step's rows. From it come π_prox and the ratios of whole rollouts,
which no micro-batch or rank sees alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pipeline.config import AlgorithmConfig
from pipeline.training.batch import MicroBatch, WeightedRow
from pipeline.training.loss import LossInputs
from pipeline.training.loss_correction import correct, is_off_policy


@dataclass(frozen=True)
class RolloutTotals:
    """Of each rollout of a step: the sum of a log-ratio over its trained tokens, and how many these are.

    Float64, because the order of rows must not matter, and on the CPU. Parts add up, over micro-batches and ranks.
    """

    values: Float[Tensor, "2 rollouts"]

    @classmethod
    def zeros(cls, count: int) -> RolloutTotals:
        """Of ``count`` rollouts, before the first micro-batch."""
        return cls(torch.zeros(2, count, dtype=torch.float64))

    @classmethod
    def of(cls, log_ratio: Float[Tensor, "tokens"], rollouts: Int[Tensor, "tokens"], count: int) -> RolloutTotals:
        """The part of one micro-batch, for ``count`` rollouts."""
        values = log_ratio.detach().cpu().double()
        both = torch.stack([values, torch.ones_like(values)])
        return cls(cls.zeros(count).values.index_add(1, rollouts.cpu(), both))

    def __add__(self, other: RolloutTotals) -> RolloutTotals:
        return RolloutTotals(self.values + other.values)

    @property
    def sums(self) -> Float[Tensor, "rollouts"]:
        """Σ_t of each rollout."""
        return self.values[0]

    @property
    def means(self) -> Float[Tensor, "rollouts"]:
        """The mean over t of each rollout; 0 for one without trained tokens."""
        return self.values[0] / self.values[1].clamp(min=1)


@dataclass(frozen=True)
class Snapshot:
    """The policy at one moment: ``logprobs`` of this rank's forwards, in their order; ``totals`` over all ranks."""

    logprobs: tuple[Float[Tensor, "tokens"], ...]
    totals: RolloutTotals


def loss_inputs(
    micro: MicroBatch,
    logprobs: Float[Tensor, "tokens"],
    entropy: Float[Tensor, "tokens"],
    algorithm: AlgorithmConfig,
    number: int = 0,
    prox: Snapshot | None = None,
    now: Snapshot | None = None,
) -> LossInputs:
    """The inputs of this rank's forward ``number``.

    ``prox`` was taken before the update against μ (the decoupled form), ``now`` before the step against the reference.
    """

    def by_token(values: Float[Tensor, "rollouts"]) -> Float[Tensor, "tokens"]:
        return values.to(logprobs.device, logprobs.dtype)[micro.rollouts]

    reference = correction = None
    if prox:
        reference = prox.logprobs[number]
        sums, means = by_token(prox.totals.sums), by_token(prox.totals.means)
        correction = correct(reference - micro.behaviour, sums, means, micro.advantages, algorithm)
    return LossInputs(
        logprobs=logprobs,
        behaviour=micro.behaviour,
        advantages=micro.advantages,
        weights=micro.weights,
        entropy=entropy,
        comparable=micro.comparable,
        reference=reference,
        correction=correction,
        rollout_ratio=by_token(now.totals.means) if now else None,
    )


def off_policy_rollouts(rows: Iterable[WeightedRow], totals: RolloutTotals, bound: float) -> int:
    """How many rollouts of a step the off-policy mask takes out, from totals against μ; a bound of 0 is none."""
    advantages = {row.rollout: row.advantage for row in rows}
    means = totals.means[list(advantages)]
    return int(is_off_policy(means, torch.tensor(list(advantages.values()), dtype=means.dtype), bound).sum())

"""The correction c of the decoupled loss: how samples of an older policy μ count at the policy π_prox before an update.

All are functions of ρ = π_prox/μ and carry no gradient. Denominators are counted before, so a masked token weighs
nothing but still counts in T_i, T̄_g and N.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pipeline.config import AlgorithmConfig
from pipeline.training.loss import LOG_RATIO_LIMIT


def importance(ratio: Float[Tensor, "tokens"], low: float, high: float) -> Float[Tensor, "tokens"]:
    """c = ρ: plain decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298), without a bound."""
    return ratio


def truncate(ratio: Float[Tensor, "tokens"], low: float, high: float) -> Float[Tensor, "tokens"]:
    """TIS: c = min(ρ, C) with C = ``high`` (IMPALA, arXiv 1802.01561); ``low`` is not used."""
    return ratio.clamp(max=high)


def mask(ratio: Float[Tensor, "tokens"], low: float, high: float) -> Float[Tensor, "tokens"]:
    """Masked importance sampling; by token it is IcePop (arXiv 2510.18855): c = ρ where low ≤ ρ ≤ high, else 0."""
    return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))


CORRECTIONS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "importance": importance,
    "tis": truncate,
    "mask": mask,
}


def correct(
    log_ratio: Float[Tensor, "tokens"],
    rollout_sums: Float[Tensor, "tokens"],
    rollout_means: Float[Tensor, "tokens"],
    advantages: Float[Tensor, "tokens"],
    algorithm: AlgorithmConfig,
) -> Float[Tensor, "tokens"]:
    """c of each token from log ρ = log π_prox − log μ, its sum and its mean over the token's whole rollout.

    With ``correction_unit=rollout`` ρ is the product over the rollout: unbiased, and useless for long rollouts.
    """
    chosen = {"token": log_ratio, "rollout": rollout_sums}[algorithm.correction_unit]
    ratio = chosen.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    weight = CORRECTIONS[algorithm.correction](ratio, algorithm.correction_low, algorithm.correction_high)
    return weight.masked_fill(is_off_policy(rollout_means, advantages, algorithm.off_policy_bound), 0.0)


def is_off_policy(
    rollout_means: Float[Tensor, "any"], advantages: Float[Tensor, "any"], bound: float
) -> Bool[Tensor, "any"]:
    """The off-policy sequence mask (DeepSeek-V3.2, arXiv 2512.02556): A < 0 and mean_t log(μ/π_prox) > bound.

    A bad rollout that the policy would hardly write any more teaches nothing but noise; a good one is kept. 0: none is.
    """
    return (advantages < 0) & (-rollout_means > bound) if bound > 0 else torch.zeros_like(advantages, dtype=torch.bool)

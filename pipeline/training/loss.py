"""The policy-gradient losses over trained tokens, one function each: L = −Σ w·c·ℓ.

w normalises (``loss_weights``), c corrects for stale samples (``loss_correction``, 1 by default), ℓ is the algorithm's.
All add up over micro-batches and ranks. None has a KL term, a value function or an entropy bonus.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # exp() stays finite in float32, and a token this far off has no gradient
NO_VALUE = float("-inf")  # the maximum over nothing


@dataclass(frozen=True)
class LossInputs:
    """The trained tokens of one micro-batch, flattened.

    ``logprobs`` are the trainer's and carry gradients; ``behaviour`` those the engine sampled with; ``weights`` hold
    all that normalises (see ``token_weights``). ``entropy`` is detached and only reported. ``comparable`` marks tokens
    that the trainer's own weights sampled, where the two logprobs should agree. ``reference`` is what the ratio is
    taken to: π_prox when decoupled, None for the behaviour logprobs. ``correction`` is c, None for 1. ``rollout_ratio``
    is the mean of log(π/reference) over all tokens of the token's rollout, before the step; only GSPO needs it.
    """

    logprobs: Float[Tensor, "tokens"]
    behaviour: Float[Tensor, "tokens"]
    advantages: Float[Tensor, "tokens"]
    weights: Float[Tensor, "tokens"]
    entropy: Float[Tensor, "tokens"]
    comparable: Bool[Tensor, "tokens"]
    reference: Float[Tensor, "tokens"] | None = None
    correction: Float[Tensor, "tokens"] | None = None
    rollout_ratio: Float[Tensor, "tokens"] | None = None

    @property
    def log_ratio(self) -> Float[Tensor, "tokens"]:
        """log r = log π − log μ, or − log π_prox when decoupled; within ±LOG_RATIO_LIMIT."""
        reference = self.behaviour if self.reference is None else self.reference
        return (self.logprobs - reference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    def total(self, objective: Float[Tensor, "tokens"]) -> Float[Tensor, ""]:
        """−Σ w·c·ℓ."""
        weights = self.weights if self.correction is None else self.weights * self.correction
        return -(weights * objective).sum()


@dataclass(frozen=True)
class LossOutputs:
    """``loss`` is this micro-batch's part of the step's loss: parts add up, ``sums`` too; ``maxima`` do not."""

    loss: Float[Tensor, ""]
    sums: dict[str, float]
    maxima: dict[str, float]


def ppo_clip(inputs: LossInputs, clip_low: float, clip_high: float) -> LossOutputs:
    """PPO-clip (arXiv 1707.06347, eq. 7): ℓ = min(rA, clip(r, 1−low, 1+high)·A).

    The ratio is to the policy that sampled, or to π_prox (decoupled PPO, arXiv 2110.00641; AReaL, arXiv 2505.24298).
    Left out: the value function and the entropy bonus. Also the loss of GRPO, Dr.GRPO and DAPO.
    """
    return _clipped(inputs, inputs.log_ratio.exp(), clip_low, clip_high)


def gspo(inputs: LossInputs, clip_low: float, clip_high: float) -> LossOutputs:
    """GSPO (arXiv 2507.18071, eq. 5 and 13): ℓ = min(sA, clip(s, 1−low, 1+high)·A), s = exp(mean_t log r).

    The mean runs over all trained tokens of the whole rollout, in whatever rows. It is known before the step, so the
    token form s·π/sg(π) (eq. 14) has its value and, with ``rollout_mean``, exactly its gradient: each token's is
    s·A·∇log π, times the token's own w and c. The paper's ranges are 3e-4 and 4e-4.
    """
    if inputs.rollout_ratio is None:
        raise ValueError("GSPO needs the rollouts' ratios before the step")
    mean = inputs.rollout_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return _clipped(inputs, (mean + inputs.logprobs - inputs.logprobs.detach()).exp(), clip_low, clip_high)


def cispo(inputs: LossInputs, clip_low: float, clip_high: float) -> LossOutputs:
    """CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4): ℓ = sg(min(r, 1+high))·A·log π, so no token's gradient is cut off.

    As in the paper's runs there is no lower bound on the weight: ``clip_low`` is not used.
    """
    ratio = inputs.log_ratio.detach().exp()
    bound = 1 + clip_high
    loss = inputs.total(ratio.clamp(max=bound) * inputs.advantages * inputs.logprobs)
    sums = {"cispo_clip_ratio": (ratio > bound) & (inputs.advantages > 0)}
    return LossOutputs(loss, _sums(inputs, ratio, sums), _maxima(inputs, ratio))


def _clipped(inputs: LossInputs, ratio: Float[Tensor, "tokens"], low: float, high: float) -> LossOutputs:
    """−Σ w·c·min(rA, clip(r)·A), and the shares of tokens whose gradient the clip cuts."""
    advantages = inputs.advantages
    loss = inputs.total(torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages))
    below, above = (ratio < 1 - low) & (advantages < 0), (ratio > 1 + high) & (advantages > 0)
    sums = {"clip_ratio/low_mean": below, "clip_ratio/high_mean": above, "clip_ratio/region_mean": below | above}
    return LossOutputs(loss, _sums(inputs, ratio, sums), _maxima(inputs, ratio))


def _sums(inputs: LossInputs, ratio: Tensor, extra: dict[str, Tensor]) -> dict[str, float]:
    """Sums over tokens; ``mismatch_kl`` is the k3 estimate of KL(μ‖π), r − 1 − log r, which is never negative."""
    log_ratio = (inputs.logprobs - inputs.behaviour).detach().double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    values = {"entropy": inputs.entropy, "ratio/mean": ratio, "mismatch_kl": log_ratio.expm1() - log_ratio, **extra}
    if inputs.correction is not None:
        values["sampling/importance_sampling_ratio/mean"] = inputs.correction
        values["is_masked"] = inputs.correction == 0
    sums = {name: float(value.detach().double().sum()) for name, value in values.items()}
    return {"tokens": float(ratio.numel())} | sums


def _maxima(inputs: LossInputs, ratio: Tensor) -> dict[str, float]:
    difference = (inputs.logprobs - inputs.behaviour).detach().abs()[inputs.comparable]
    maxima = {"ratio/max": _max(ratio.detach()), "logprob_diff_max": _max(difference)}
    if inputs.correction is not None:
        maxima["sampling/importance_sampling_ratio/max"] = _max(inputs.correction)
    return maxima


def _max(values: Tensor) -> float:
    return float(values.max()) if values.numel() else NO_VALUE


LOSSES: dict[str, Callable[[LossInputs, float, float], LossOutputs]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
}
NEEDS_ROLLOUT_RATIO = (gspo,)

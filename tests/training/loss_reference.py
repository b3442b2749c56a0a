"""The losses once more, token by token in NumPy float64, written from the papers' formulas; and made-up policies."""

from __future__ import annotations

import numpy as np
import torch

from pipeline.config import AlgorithmConfig
from pipeline.records import RolloutRecord, Row, TrainGroup
from pipeline.training.batch import RowBatch, collate, make_minibatch, plan
from pipeline.training.loss import LOSSES
from pipeline.training.loss_inputs import RolloutTotals, Snapshot, loss_inputs

Gradients = dict[tuple[int, ...], float]

CONSTANT = 64
NOW, BEFORE = 1.7, 1.45  # which made-up policy


def policy(ids: np.ndarray, which: float = NOW) -> np.ndarray:
    """Logprobs: a token's depends on it and on the token before it."""
    return -2 - 2 * np.abs(np.sin(which * ids + 0.3 * np.roll(ids, 1))).astype(np.float64)


def divisor(groups: list[TrainGroup], group: TrainGroup, member: RolloutRecord, aggregation: str) -> float:
    """What a token of ``member`` is divided by."""

    def length(rollout: RolloutRecord) -> int:
        return sum(int(row.loss_mask.sum()) for row in rollout.rows)

    n = sum(len(each.rollouts) for each in groups)
    return {
        "group_mean": n * float(np.mean([length(each) for each in group.rollouts])),
        "rollout_mean": n * length(member),
        "token_mean": sum(length(each) for every in groups for each in every.rollouts),
        "constant": n * CONSTANT,
    }[aggregation]


def log_ratios(member: RolloutRecord, of: float, to: float | None) -> np.ndarray:
    """Of a whole rollout's trained tokens, log of one policy over another (None: the one that sampled)."""
    parts = [
        policy(row.input_ids, of) - (row.logprobs.astype(np.float64) if to is None else policy(row.input_ids, to))
        for row in member.rows
    ]
    return np.concatenate([part[row.loss_mask] for part, row in zip(parts, member.rows, strict=True)])


def expected_correction(member: RolloutRecord, t: int, advantage: float, algorithm: AlgorithmConfig) -> float:
    """c of trained token ``t`` of a rollout."""
    if not algorithm.decoupled:
        return 1.0
    logs = log_ratios(member, BEFORE, None)
    if algorithm.off_policy_bound and advantage < 0 and -logs.mean() > algorithm.off_policy_bound:
        return 0.0
    rho = np.exp(logs.sum() if algorithm.correction_unit == "rollout" else logs[t])
    if algorithm.correction == "mask":
        return rho if algorithm.correction_low <= rho <= algorithm.correction_high else 0.0
    return min(rho, algorithm.correction_high) if algorithm.correction == "tis" else rho


def expected_term(
    member: RolloutRecord, t: int, advantage: float, logprob: float, algorithm: AlgorithmConfig
) -> tuple[float, float]:
    """ℓ and dℓ/dlogπ of trained token ``t`` of a rollout."""
    logs = log_ratios(member, NOW, BEFORE if algorithm.decoupled else None)
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    if algorithm.loss == "cispo":
        weight = min(np.exp(logs[t]), high) * advantage
        return weight * logprob, weight
    ratio = np.exp(logs.mean() if algorithm.loss == "gspo" else logs[t])
    clipped = np.clip(ratio, low, high) * advantage
    return min(ratio * advantage, clipped), ratio * advantage * (ratio * advantage <= clipped)


def reference(groups: list[TrainGroup], algorithm: AlgorithmConfig) -> tuple[float, Gradients]:
    """L = −Σ c·ℓ/divisor, and dL/dlogπ of each token, which is known by the ids up to it."""
    loss = 0.0
    gradients: Gradients = {}
    for group in groups:
        for member, advantage in zip(group.rollouts, group.advantages, strict=True):
            t = 0
            for row in member.rows:
                for place in np.flatnonzero(row.loss_mask):
                    logprob = policy(row.input_ids)[place]
                    value, slope = expected_term(member, t, advantage, logprob, algorithm)
                    weight = expected_correction(member, t, advantage, algorithm)
                    weight /= divisor(groups, group, member, algorithm.aggregation)
                    loss -= weight * value
                    key = (*row.input_ids[: place + 1].tolist(),)  # two rows may begin alike
                    gradients[key] = gradients.get(key, 0.0) - weight * slope
                    t += 1
    return loss, gradients


def compute(
    groups: list[TrainGroup], algorithm: AlgorithmConfig, budget: int = 10**6, share: bool = True, ranks: int = 1
) -> tuple[float, Gradients]:
    """The same by the code under test, over every micro-batch of every rank."""
    minibatch = make_minibatch(groups, algorithm, None)
    batches = [batch for own in plan(minibatch.rows, budget, share, ranks) for batch in own]
    before = snapshot(batches, minibatch.rollouts, BEFORE, None) if algorithm.decoupled else None
    now = snapshot(batches, minibatch.rollouts, NOW, before) if algorithm.loss == "gspo" else None
    loss = 0.0
    gradients: Gradients = {}
    for number, batch in enumerate(batches):
        logprobs = trained_logprobs(batch, NOW).requires_grad_()
        inputs = loss_inputs(
            collate(batch), logprobs, torch.zeros(len(logprobs)), algorithm, number=number, prox=before, now=now
        )
        outputs = LOSSES[algorithm.loss](inputs, algorithm.clip_low, algorithm.clip_high)
        outputs.loss.backward()
        assert logprobs.grad is not None
        for key, gradient in zip(trained_keys(batch), logprobs.grad.tolist(), strict=True):
            gradients[key] = gradients.get(key, 0.0) + gradient
        loss += outputs.loss.item()
    return loss, gradients


def snapshot(batches: list[RowBatch], rollouts: int, which: float, prox: Snapshot | None) -> Snapshot:
    """As the trainer takes it: logprobs of every forward, ratios summed over all but the fillers."""
    logprobs, totals = [], RolloutTotals.zeros(rollouts)
    for number, batch in enumerate(batches):
        micro = collate(batch)
        logprobs.append(trained_logprobs(batch, which))
        to = prox.logprobs[number] if prox else micro.behaviour
        if not batch.filler:
            totals += RolloutTotals.of(logprobs[-1] - to, micro.rollouts, rollouts)
    return Snapshot(tuple(logprobs), totals)


def trained_logprobs(batch: RowBatch, which: float) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([trained(row.row, policy(row.row.input_ids, which)) for row in batch.rows]))


def trained(row: Row, values: np.ndarray) -> np.ndarray:
    return values[row.loss_mask]


def trained_keys(batch: RowBatch) -> list[tuple[int, ...]]:
    """The ids up to each trained token, in the order of the forward."""
    return [(*row.row.input_ids[: t + 1].tolist(),) for row in batch.rows for t in np.flatnonzero(row.row.loss_mask)]

"""The loss against a float64 reference written from the formulas, and what must not change it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_helpers import random_groups, rollout

from pipeline.config import AlgorithmConfig, UserError
from pipeline.records import RolloutRecord, Row, TrainGroup
from pipeline.training.batch import collate, make_minibatch, plan, split_minibatches
from pipeline.training.loss import AGGREGATIONS, LossInputs, check_algorithm, ppo_clip

LOW, HIGH, CONSTANT = 0.2, 0.28, 64


def policy_logprobs(ids: np.ndarray) -> np.ndarray:
    """A made-up policy: a token's logprob depends on it and on the token before it."""
    return -2 - 2 * np.abs(np.sin(1.7 * ids + 0.3 * np.roll(ids, 1))).astype(np.float64)


def reference(groups: list[TrainGroup], aggregation: str) -> tuple[float, dict[tuple[int, ...], float]]:
    """L = −(1/N) Σ_g (1/T̄_g) Σ_i Σ_k Σ_t m·ℓ and its kin, token by token; also dL/dlogπ, keyed by the ids."""
    n = sum(len(group.rollouts) for group in groups)
    total = sum(row.loss_mask.sum() for group in groups for member in group.rollouts for row in member.rows)
    loss, gradients = 0.0, {}
    for group in groups:
        lengths = [sum(int(row.loss_mask.sum()) for row in member.rows) for member in group.rollouts]
        for member, advantage, length in zip(group.rollouts, group.advantages, lengths, strict=True):
            divisor = {
                "group_mean": n * float(np.mean(lengths)),
                "rollout_mean": n * length,
                "token_mean": total,
                "constant": n * CONSTANT,
            }[aggregation]
            for row in member.rows:
                for t in np.flatnonzero(row.loss_mask):
                    ratio = np.exp(policy_logprobs(row.input_ids)[t] - float(row.logprobs[t]))
                    clipped = np.clip(ratio, 1 - LOW, 1 + HIGH)
                    loss -= min(ratio * advantage, clipped * advantage) / divisor
                    active = ratio * advantage <= clipped * advantage
                    gradients[(*row.input_ids[: t + 1].tolist(),)] = -ratio * advantage * active / divisor
    return loss, gradients


def compute(
    groups: list[TrainGroup], aggregation: str, budget: int = 10**6, share: bool = True, ranks: int = 1
) -> tuple[float, dict[tuple[int, ...], float]]:
    """The same by the code under test, over every micro-batch of every rank."""
    algorithm = AlgorithmConfig(aggregation=aggregation, constant_tokens=CONSTANT)
    loss, gradients = 0.0, {}
    for batch in (
        batch for own in plan(make_minibatch(groups, algorithm, None).rows, budget, share, ranks) for batch in own
    ):
        micro = collate(batch)
        values = [policy_logprobs(row.row.input_ids)[row.row.loss_mask] for row in batch.rows]
        logprobs = torch.from_numpy(np.concatenate(values)).requires_grad_()
        zeros = torch.zeros(len(logprobs))
        outputs = ppo_clip(
            LossInputs(logprobs, micro.behaviour, micro.advantages, micro.weights, zeros, micro.comparable), LOW, HIGH
        )
        outputs.loss.backward()
        keys = [
            (*row.row.input_ids[: t + 1].tolist(),) for row in batch.rows for t in np.flatnonzero(row.row.loss_mask)
        ]
        assert logprobs.grad is not None
        for key, gradient in zip(keys, logprobs.grad.tolist(), strict=True):
            gradients[key] = gradients.get(key, 0.0) + gradient
        loss += outputs.loss.item()
    return loss, gradients


def assert_same(left: tuple[float, dict], right: tuple[float, dict]) -> None:
    assert left[0] == pytest.approx(right[0], rel=1e-6, abs=1e-7)
    assert left[1] == pytest.approx(right[1], rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_match_the_formula(aggregation: str, seed: int) -> None:
    groups = random_groups(seed)
    assert_same(compute(groups, aggregation), reference(groups, aggregation))


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    budget=st.integers(1, 400),
    share=st.booleans(),
    ranks=st.integers(1, 4),
    order=st.randoms(),
)
def test_batching_changes_nothing(aggregation: str, seed: int, budget: int, share: bool, ranks: int, order) -> None:
    groups = random_groups(seed)
    shuffled = list(groups)
    order.shuffle(shuffled)
    assert_same(compute(shuffled, aggregation, budget, share, ranks), compute(groups, aggregation))


def split_row(row: Row, at: int) -> tuple[Row, ...]:
    """A row as two: the tokens before ``at`` supervised in the first, the rest in the second."""
    late = np.arange(len(row.input_ids)) >= at
    parts = (
        Row(row.input_ids[:at], row.loss_mask[:at], row.logprobs[:at]),
        Row(row.input_ids, row.loss_mask & late, np.where(late, row.logprobs, 0).astype(np.float32)),
    )
    return tuple(part for part in parts if part.trained_tokens)


def split_rollout(member: RolloutRecord, rng: np.random.Generator) -> RolloutRecord:
    rows = (part for row in member.rows for part in split_row(row, int(rng.integers(1, len(row.input_ids)))))
    return replace(member, rows=tuple(rows))


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_splitting_rollouts_into_more_rows_changes_nothing(aggregation: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = random_groups(seed)
    split = [
        replace(group, rollouts=tuple(split_rollout(member, rng) for member in group.rollouts)) for group in groups
    ]
    assert sum(len(m.rows) for g in split for m in g.rollouts) >= sum(len(m.rows) for g in groups for m in g.rollouts)
    assert_same(compute(split, aggregation), compute(groups, aggregation))


def test_group_mean_weighs_groups_by_rollouts_not_by_tokens() -> None:
    """A group with ten times the tokens moves the loss as much as another; token_mean lets it rule."""

    def group(name: str, tokens: int) -> TrainGroup:
        ids = np.arange(1, tokens + 2, dtype=np.int32)
        mask = np.arange(tokens + 1) > 0
        row = Row(ids, mask, np.zeros(tokens + 1, np.float32))
        return TrainGroup(name, "pi", (rollout(f"{name}/0", (row,)), rollout(f"{name}/1", (row,))), (1.0, -1.0))

    groups = [group("short", 10), group("long", 100)]
    share = {
        name: [weight[0] * tokens for weight, tokens in zip(rule(groups, AlgorithmConfig()), (10, 100), strict=True)]
        for name, rule in AGGREGATIONS.items()
    }
    assert share["group_mean"] == pytest.approx([0.25, 0.25])
    assert share["token_mean"] == pytest.approx([10 / 220, 100 / 220])


def test_rollout_without_a_trained_token_counts_in_the_denominator() -> None:
    groups = random_groups(0, groups=1)
    empty = replace(groups[0].rollouts[0], rows=())
    with_empty = replace(groups[0], rollouts=(empty, *groups[0].rollouts[1:]))
    assert_same(compute([with_empty], "group_mean"), reference([with_empty], "group_mean"))


@given(seed=st.integers(0, 10**6), groups=st.integers(1, 9), count=st.integers(1, 5), order=st.randoms())
@settings(max_examples=30, deadline=None)
def test_minibatches_keep_groups_whole_and_do_not_depend_on_order(seed: int, groups: int, count: int, order) -> None:
    made = random_groups(seed, groups=groups)
    parts = split_minibatches(made, count)
    assert sorted(g.group_id for part in parts for g in part) == sorted(g.group_id for g in made)
    assert all(parts) and len(parts) == min(groups, count)
    shuffled = list(made)
    order.shuffle(shuffled)
    names = [[g.group_id for g in part] for part in parts]
    assert [[g.group_id for g in part] for part in split_minibatches(shuffled, count)] == names


def test_clip_metrics_count_only_tokens_whose_gradient_is_cut() -> None:
    ratio = torch.tensor([0.5, 0.5, 1.0, 2.0, 2.0])
    advantage = torch.tensor([-1.0, 1.0, 1.0, 1.0, -1.0])
    ones = torch.ones(5)
    outputs = ppo_clip(LossInputs(ratio.log(), torch.zeros(5), advantage, ones, ones, ones.bool()), 0.2, 0.2)
    assert outputs.sums["clip_ratio/low_mean"] == outputs.sums["clip_ratio/high_mean"] == 1
    assert outputs.sums["clip_ratio/region_mean"] == 2
    assert outputs.maxima["ratio/max"] == 2
    assert float(outputs.loss) == pytest.approx(-(-0.8 + 0.5 + 1.0 + 1.2 - 2.0))


def test_a_ratio_far_off_stays_finite() -> None:
    logprobs = torch.tensor([0.0], requires_grad=True)
    behaviour = torch.tensor([-500.0])
    one = torch.ones(1)
    outputs = ppo_clip(LossInputs(logprobs, behaviour, -one, one, one, one.bool()), 0.2, 0.2)
    outputs.loss.backward()
    assert torch.isfinite(outputs.loss) and torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize(
    "wrong", [{"loss": "reinforce"}, {"aggregation": "mean"}, {"clip_low": 1.5}, {"minibatches": 0}]
)
def test_wrong_settings_are_refused(wrong: dict) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        check_algorithm(AlgorithmConfig(**wrong))

"""The losses against a float64 reference written from the formulas, and what must not change them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_reference import CONSTANT, Gradients, compute, reference
from training_helpers import random_groups, rollout

from pipeline import config
from pipeline.config import AlgorithmConfig, UserError, check_algorithm
from pipeline.records import RolloutRecord, Row, TrainGroup
from pipeline.training.batch import split_minibatches
from pipeline.training.loss import LOSSES, LossInputs, cispo, gspo, ppo_clip
from pipeline.training.loss_correction import CORRECTIONS, correct
from pipeline.training.loss_weights import AGGREGATIONS

DECOUPLED: dict = {"decoupled": True, "correction_low": 0.7, "correction_high": 1.5}
VARIANTS: dict[str, dict] = {
    "ppo_clip": {},
    "gspo": {"loss": "gspo"},
    "cispo": {"loss": "cispo"},
    "importance": DECOUPLED | {"correction": "importance"},
    "tis": DECOUPLED | {"correction": "tis"},
    "icepop": DECOUPLED | {"correction": "mask"},
    "tis by rollout": DECOUPLED | {"correction": "tis", "correction_unit": "rollout"},
    "mask by rollout": DECOUPLED | {"correction_unit": "rollout", "correction_low": 0.05, "correction_high": 20.0},
    "off-policy mask": DECOUPLED | {"off_policy_bound": 0.1},
    "decoupled gspo": DECOUPLED | {"loss": "gspo", "correction": "tis"},
    "decoupled cispo": DECOUPLED | {"loss": "cispo"},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_aggregation = pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    """Plain torch in double precision: what is left of a difference is a mistake, not rounding."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def small_groups(seed: int) -> list[TrainGroup]:
    return random_groups(seed, groups=2, size=3, prefix=6, longest=6)


def settings_of(variant: str, aggregation: str) -> AlgorithmConfig:
    base = {"aggregation": aggregation, "constant_tokens": CONSTANT, "clip_low": 0.2, "clip_high": 0.28}
    algorithm = AlgorithmConfig(**(base | VARIANTS[variant]))
    check_algorithm(algorithm)
    return algorithm


def assert_same(left: tuple[float, Gradients], right: tuple[float, Gradients]) -> None:
    assert left[0] == pytest.approx(right[0], rel=1e-9, abs=1e-12)
    assert left[1].keys() == right[1].keys()
    ours, theirs = (np.array([side[1][key] for key in left[1]]) for side in (left, right))
    assert np.linalg.norm(ours - theirs) <= 1e-9 * np.linalg.norm(theirs)


@every_variant
@every_aggregation
@pytest.mark.parametrize("seed", range(2))
def test_loss_and_gradient_match_the_formula(variant: str, aggregation: str, seed: int) -> None:
    groups, algorithm = small_groups(seed), settings_of(variant, aggregation)
    assert_same(compute(groups, algorithm), reference(groups, algorithm))


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


@every_variant
@every_aggregation
@settings(max_examples=4, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    budget=st.integers(1, 200),
    share=st.booleans(),
    ranks=st.integers(1, 4),
    order=st.randoms(),
)
def test_rows_batches_order_and_ranks_change_nothing(
    variant: str, aggregation: str, seed: int, budget: int, share: bool, ranks: int, order
) -> None:
    algorithm, groups, rng = settings_of(variant, aggregation), small_groups(seed), np.random.default_rng(seed)
    whole = compute(groups, algorithm)
    split = [
        replace(group, rollouts=tuple(split_rollout(member, rng) for member in group.rollouts)) for group in groups
    ]
    order.shuffle(split)
    assert_same(compute(split, algorithm, budget, share, ranks), whole)


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
    algorithm = settings_of("ppo_clip", "group_mean")
    assert_same(compute([with_empty], algorithm), reference([with_empty], algorithm))


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


def inputs(ratio: list[float], advantage: list[float], **more: torch.Tensor) -> LossInputs:
    """Tokens with these ratios to the policy that sampled, weighing 1."""
    ones = torch.ones(len(ratio))
    logprobs = torch.tensor(ratio).log().requires_grad_()
    return LossInputs(logprobs, 0 * ones, torch.tensor(advantage), ones, ones, ones.bool(), **more)


def test_gspo_clips_by_rollout_and_gives_each_token_its_own_gradient() -> None:
    """Two tokens of one rollout, ratios 0.5 and 4: s = √2 is clipped, though one token's own ratio would not be."""
    ratio = torch.tensor([0.5, 4.0]).log().mean().expand(2)
    up, down = (inputs([0.5, 4.0], [sign, sign], rollout_ratio=ratio) for sign in (1.0, -1.0))
    clipped = gspo(up, 0.2, 0.28)
    assert clipped.loss.item() == pytest.approx(-2 * 1.28) and clipped.sums["clip_ratio/high_mean"] == 2
    clipped.loss.backward()
    assert up.logprobs.grad is not None and up.logprobs.grad.tolist() == [0, 0]
    gspo(down, 0.2, 0.28).loss.backward()
    assert down.logprobs.grad is not None and down.logprobs.grad.tolist() == pytest.approx([2**0.5, 2**0.5])
    with pytest.raises(ValueError, match="rollouts' ratios"):
        gspo(inputs([1.0], [1.0]), 0.2, 0.2)


def test_cispo_keeps_every_tokens_gradient() -> None:
    made = inputs([0.1, 1.0, 9.0], [1.0, -1.0, 1.0])
    outputs = cispo(made, 0.2, 4.0)
    outputs.loss.backward()
    assert made.logprobs.grad is not None and made.logprobs.grad.tolist() == pytest.approx([-0.1, 1.0, -5.0])
    assert outputs.sums["cispo_clip_ratio"] == 1 and outputs.maxima["ratio/max"] == pytest.approx(9)


def test_masked_tokens_are_counted_and_keep_their_place_in_the_denominator() -> None:
    algorithm = AlgorithmConfig(decoupled=True, correction="mask", correction_low=0.5, correction_high=2.0)
    rho = torch.tensor([0.4, 0.5, 1.0, 2.0, 2.1])
    zeros = torch.zeros(5)
    correction = correct(rho.log(), zeros, zeros, -torch.ones(5), replace(algorithm, correction_low=0.4999))
    assert correction.tolist() == pytest.approx([0, 0.5, 1, 2, 0])
    outputs = ppo_clip(inputs([1.0] * 5, [-1.0] * 5, correction=correction), 0.2, 0.2)
    assert outputs.loss.item() == pytest.approx(3.5), "five tokens of weight 1, two of them masked"
    assert (outputs.sums["is_masked"], outputs.sums["tokens"]) == (2, 5)
    assert outputs.sums["sampling/importance_sampling_ratio/mean"] == pytest.approx(3.5)
    assert outputs.maxima["sampling/importance_sampling_ratio/max"] == pytest.approx(2)


def test_the_off_policy_mask_takes_bad_rollouts_only() -> None:
    algorithm = AlgorithmConfig(decoupled=True, correction="importance", off_policy_bound=0.5)
    means, advantages = torch.tensor([-0.6, -0.4, -0.6, 0.6]), torch.tensor([-1.0, -1.0, 1.0, -1.0])
    zeros = torch.zeros(4)
    assert correct(zeros, zeros, means, advantages, algorithm).tolist() == [0, 1, 1, 1]


def test_names_in_the_settings_are_those_of_the_tables() -> None:
    """Settings are checked without torch, so the names stand in two places."""
    assert set(config.LOSSES) == set(LOSSES)
    assert set(config.AGGREGATIONS) == set(AGGREGATIONS)
    assert set(config.CORRECTIONS) == set(CORRECTIONS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": "reinforce"},
        {"aggregation": "mean"},
        {"clip_low": 1.5},
        {"clip_high": float("nan")},
        {"minibatches": 0},
        {"constant_tokens": 0},
        {"correction": "clip"},
        {"correction_unit": "row"},
        {"correction_low": 1.5},
        {"correction_high": 0.9},
        {"off_policy_bound": 0.5},
        {"off_policy_bound": -1.0, "decoupled": True},
        {"overlong_cache": 5},
    ],
)
def test_wrong_settings_are_refused(wrong: dict) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        check_algorithm(AlgorithmConfig(**wrong))

"""Log-probabilities and gradients of every path against one plain forward a row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training_helpers import MODELS, qwen3, random_groups

from pipeline.config import AlgorithmConfig, UserError
from pipeline.training import attention, batch, forward
from pipeline.training.batch import RowBatch, WeightedRow, collate, make_minibatch, plan
from pipeline.training.forward import PolicyModel

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module", autouse=True)
def part_early() -> Iterator[None]:
    """Part rows over a few tokens, so that short test rows meet the same cases as long real ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "FORWARD_OVERHEAD", 4)
        yield


def weighted_rows(seed: int) -> tuple[WeightedRow, ...]:
    return make_minibatch(random_groups(seed, prefix=30), AlgorithmConfig(), None).rows


def coefficient(row: WeightedRow) -> Tensor:
    """A different factor for every trained token, so that no two can be swapped unseen."""
    return torch.from_numpy(np.cos(np.flatnonzero(row.row.loss_mask) + row.row.input_ids.sum())).float()


def plain(
    kind: str, rows: tuple[WeightedRow, ...], temperature: float = 1.0
) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """Logprobs by row and gradients, one unpadded transformers forward a row."""
    model = MODELS[kind](0)
    logprobs = {}
    for row in rows:
        ids = torch.from_numpy(row.row.input_ids.astype(np.int64))
        scores = (model(ids[None], use_cache=False).logits[0] / temperature).log_softmax(-1)
        values = scores[:-1].gather(1, ids[1:, None])[:, 0][torch.from_numpy(row.row.loss_mask[1:])]
        (values * coefficient(row)).sum().backward()
        logprobs[id(row)] = values.detach()
    return logprobs, gradients(model)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def run(policy: PolicyModel, batches: list[RowBatch], pad_id: int = 0) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """The same through the policy, over given micro-batches."""
    logprobs = {}
    for own in batches:
        values, _ = policy(collate(own, pad_id))
        (values * torch.cat([coefficient(row) for row in own.rows])).sum().backward()
        counts = [row.row.trained_tokens for row in own.rows]
        logprobs |= {id(row): part.detach() for row, part in zip(own.rows, values.split(counts), strict=True)}
    return logprobs, gradients(policy.model)


def assert_same(left: tuple[dict, dict], right: tuple[dict, dict]) -> None:
    for mine, other in zip(left, right, strict=True):
        assert mine.keys() == other.keys()
        for name in mine:
            scale = float(other[name].abs().max()) + 1.0
            torch.testing.assert_close(mine[name] / scale, other[name] / scale, **TOLERANCE)


@pytest.mark.parametrize("kind", sorted(MODELS))
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.integers(8, 400), pad_id=st.integers(0, 96))
def test_every_batching_and_padding_matches_plain_forwards(kind: str, seed: int, budget: int, pad_id: int) -> None:
    rows = weighted_rows(seed)
    policy = PolicyModel(MODELS[kind](0))
    (batches,) = plan(rows, budget, policy.shares_prefix)
    assert_same(run(policy, batches, pad_id), plain(kind, rows))


def test_prefixes_are_shared_where_that_is_exact() -> None:
    rows = weighted_rows(0)
    (batches,) = plan(rows, 10**6, True)
    assert len(batches) < len(rows) and min(own.prefix for own in batches) >= 10
    assert PolicyModel(MODELS["qwen3"](0)).shares_prefix
    assert not PolicyModel(MODELS["lfm2"](0)).shares_prefix
    assert not PolicyModel(MODELS["qwen3"](0), gradient_checkpointing=True).shares_prefix


def test_the_shared_path_beats_copies_of_the_prefix_on_work() -> None:
    rows = weighted_rows(0)
    (shared,), (whole,) = plan(rows, 10**6, True), plan(rows, 10**6, False)
    assert sum(own.cost for own in shared) < 0.5 * sum(own.cost for own in whole)


def test_prefix_stops_before_what_predicts_the_first_trained_token() -> None:
    rows = weighted_rows(3)
    twins = (rows[0], rows[0])
    (batches,) = plan(twins, 10**6, True)
    assert batches[0].prefix == rows[0].first_trained - 1
    logprobs, _ = plain("qwen3", (rows[0],))
    values, _ = PolicyModel(qwen3())(collate(batches[0]))
    torch.testing.assert_close(values.detach(), logprobs[id(rows[0])].repeat(2), **TOLERANCE)


def test_a_row_longer_than_the_budget_runs_alone_and_none_is_lost() -> None:
    rows = weighted_rows(1)
    (batches,) = plan(rows, 8, False)
    assert sorted(id(row) for own in batches for row in own.rows) == sorted(map(id, rows))
    assert all(len(own.rows) == 1 for own in batches if own.padded_tokens > 8)


def test_a_prefix_longer_than_the_budget_is_not_run_for_every_row() -> None:
    rows = make_minibatch(random_groups(1, groups=1, prefix=300), AlgorithmConfig(), None).rows
    (batches,) = plan(rows, 8, True)
    assert sorted(id(row) for own in batches for row in own.rows) == sorted(map(id, rows))
    assert len(batches) == 1 and 8 < batches[0].padded_tokens <= batches[0].prefix


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return made


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_long_rows_are_exact_and_hold_nothing_of_their_length_squared(kind: str) -> None:
    """The prompts of whole harnesses are longer than any budget; attention must not write its scores down."""
    rows = make_minibatch(random_groups(5, groups=1, size=2, prefix=1500, longest=600), AlgorithmConfig(), None).rows
    policy = PolicyModel(MODELS[kind](0))
    (batches,) = plan(rows, 64, policy.shares_prefix)
    with Largest() as largest:
        mine = run(policy, batches)
    assert_same(mine, plain(kind, rows))
    assert largest.elements < 1500 * 1500 / 2, "linear in the length, times the widest layer"


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_gradient_checkpointing_changes_nothing(kind: str) -> None:
    rows = weighted_rows(2)
    policy = PolicyModel(MODELS[kind](0), gradient_checkpointing=True)
    (batches,) = plan(rows, 200, policy.shares_prefix)
    assert_same(run(policy, batches), plain(kind, rows))


def test_head_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = weighted_rows(4)
    monkeypatch.setattr(forward, "LOGIT_CHUNK", 97 * 5)
    policy = PolicyModel(qwen3())
    (batches,) = plan(rows, 10**6, True)
    assert_same(run(policy, batches), plain("qwen3", rows))


def test_temperature_is_the_engines() -> None:
    rows = weighted_rows(5)
    (batches,) = plan(rows, 10**6, True)
    assert_same(run(PolicyModel(qwen3(), temperature=0.7), batches), plain("qwen3", rows, temperature=0.7))


def test_entropy_is_the_distributions() -> None:
    rows = weighted_rows(6)[:1]
    row = rows[0].row
    _, entropy = PolicyModel(qwen3())(collate(RowBatch(rows, 0)))
    with torch.no_grad():
        logits = qwen3()(torch.from_numpy(row.input_ids.astype(np.int64))[None]).logits[0, :-1]
    expected = torch.distributions.Categorical(logits=logits).entropy()[torch.from_numpy(row.loss_mask[1:])]
    torch.testing.assert_close(entropy, expected, **TOLERANCE)


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 5),
    length=st.integers(1, 20),
    prefix=st.integers(1, 40),
    repeat=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_joined_attention_equals_masked_attention(rows: int, length: int, prefix: int, repeat: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, 2 * repeat, length, 8), *[(rows, 2, length, 8)] * 2, *[(1, 2, prefix, 8)] * 2]
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    weight = torch.randn(shapes[0], generator=generator)
    joined = attention._JoinedAttention.apply(*inputs, 0.3)
    masked = attention._masked_attention(*inputs, 0.3)
    torch.testing.assert_close(joined, masked, **TOLERANCE)
    pairs = zip(
        torch.autograd.grad((joined * weight).sum(), inputs),
        torch.autograd.grad((masked * weight).sum(), inputs),
        strict=True,
    )
    for mine, other in pairs:
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_a_model_that_changes_its_logits_is_refused() -> None:
    model = qwen3()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(UserError, match="final_logit_softcapping"):
        PolicyModel(model)

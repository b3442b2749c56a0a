"""Log-probabilities and gradients of every path against one plain forward a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from training_helpers import MODELS, qwen3, random_groups
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.config import AlgorithmConfig, UserError
from pipeline.training import head, prefix_tree
from pipeline.training.batch import RowBatch, WeightedRow, collate, make_minibatch, plan
from pipeline.training.forward import PolicyModel

EXACT = {"rtol": 1e-9, "atol": 1e-9}


@pytest.fixture(scope="module", autouse=True)
def share_everything() -> Iterator[None]:
    """Share the shortest prefix, so that short test rows meet the same cases as long real ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_tree, "LEAST_SHARED", 1)
        yield


class InDouble(TorchFunctionMode):
    """Whoever asks for float32 gets float64: norms, rotations and linear attention of transformers round otherwise."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = Tensor.double if function is Tensor.float else function
        args, kwargs = tree_map(lambda own: torch.float64 if own is torch.float32 else own, (args, kwargs or {}))
        return function(*args, **kwargs)


def call_in_double(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with InDouble():
        return function(*args, **kwargs)


@pytest.fixture(autouse=True)
def in_double() -> Iterator[None]:
    with InDouble():
        yield


def model(kind: str) -> PreTrainedModel:
    return MODELS[kind](0)


def weighted_rows(seed: int) -> tuple[WeightedRow, ...]:
    return make_minibatch(random_groups(seed, prefix=30), AlgorithmConfig(), None).rows


def coefficient(row: WeightedRow) -> Tensor:
    """A different factor for every trained token, so that no two can be swapped unseen."""
    return torch.from_numpy(np.cos(np.flatnonzero(row.row.loss_mask) + row.row.input_ids.sum())).float()


def plain(
    kind: str, rows: tuple[WeightedRow, ...], temperature: float = 1.0
) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """Logprobs by row and gradients, one unpadded transformers forward a row."""
    reference = model(kind)
    logprobs = {}
    for row in rows:
        ids = torch.from_numpy(row.row.input_ids.astype(np.int64))
        scores = (reference(ids[None], use_cache=False).logits[0] / temperature).log_softmax(-1)
        values = scores[:-1].gather(1, ids[1:, None])[:, 0][torch.from_numpy(row.row.loss_mask[1:])]
        (values * coefficient(row)).sum().backward()
        logprobs[id(row)] = values.detach()
    return logprobs, gradients(reference)


def gradients(trained: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in trained.named_parameters() if parameter.grad is not None}


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
    """Relative to the norm of a row's logprobs and of a parameter's gradient."""
    for mine, other in zip(left, right, strict=True):
        assert mine.keys() == other.keys()
        for name in mine:
            assert mine[name].dtype == other[name].dtype == torch.float64
            assert (mine[name] - other[name]).norm() <= 1e-9 * other[name].norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(MODELS))
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.integers(8, 400), pad_id=st.integers(0, 96))
def test_every_batching_and_padding_matches_plain_forwards(kind: str, seed: int, budget: int, pad_id: int) -> None:
    rows = weighted_rows(seed)
    policy = PolicyModel(model(kind))
    (batches,) = plan(rows, budget, policy.packs)
    assert_same(run(policy, batches, pad_id), plain(kind, rows))


def test_what_has_other_layers_than_full_attention_is_not_packed(caplog: pytest.LogCaptureFixture) -> None:
    assert PolicyModel(qwen3()).packs and PolicyModel(qwen3(), gradient_checkpointing=True).packs
    assert not caplog.records
    for kind in ("lfm2", "qwen3_5"):
        assert not PolicyModel(model(kind)).packs
    assert [record.args for record in caplog.records] == [("lfm2",), ("qwen3_5_text",)]


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_5"])
def test_why_hybrid_models_are_not_packed(kind: str) -> None:
    """Their code here carries convolution and recurrent state over. If this fails, they can be packed."""
    hybrid, rows = model(kind), weighted_rows(0)[:2]
    ids = [torch.from_numpy(row.row.input_ids.astype(np.int64)) for row in rows]
    lengths = torch.tensor([0, *map(len, ids)], dtype=torch.int32)
    hints = {
        "position_ids": torch.cat([torch.arange(len(own)) for own in ids])[None],
        "seq_idx": torch.arange(2, dtype=torch.int32).repeat_interleave(lengths[1:])[None],
        "cu_seq_lens_q": lengths.cumsum(0, dtype=torch.int32),
    }
    with torch.no_grad():
        packed = hybrid.base_model(torch.cat(ids)[None], use_cache=False, **hints).last_hidden_state[0, len(ids[0]) :]
        alone = hybrid.base_model(ids[1][None], use_cache=False).last_hidden_state[0]
    assert (packed[:2] - alone[:2]).abs().max() > 0.01


@pytest.mark.parametrize("kind", sorted(MODELS))
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_changing_a_row_changes_no_other(kind: str, seed: int, data: st.DataObject) -> None:
    rows = weighted_rows(seed)
    policy = PolicyModel(model(kind))
    chosen = data.draw(st.integers(0, len(rows) - 1))
    ids = rows[chosen].row.input_ids.copy()
    ids[-1 - data.draw(st.integers(0, len(ids) - 1))] = 0  # an id that no row has
    changed = list(rows)
    changed[chosen] = replace(rows[chosen], row=replace(rows[chosen].row, input_ids=ids))
    with torch.no_grad():
        before, after = (values(policy, own) for own in (rows, changed))
    for index, (left, right) in enumerate(zip(before, after, strict=True)):
        if index != chosen:
            torch.testing.assert_close(left, right, **EXACT)
    assert not torch.allclose(before[chosen], after[chosen], rtol=1e-9, atol=0)


def values(policy: PolicyModel, rows: Sequence[WeightedRow]) -> list[Tensor]:
    """Logprobs of rows in one forward, in their order."""
    logprobs, _ = policy(collate(RowBatch(tuple(rows), policy.packs, 0)))
    return list(logprobs.split([row.row.trained_tokens for row in rows]))


def test_packing_runs_every_distinct_prefix_once() -> None:
    rows = weighted_rows(0)
    (packed,), (whole,) = plan(rows, 10**6, True), plan(rows, 10**6, False)
    distinct = {row.row.input_ids[:stop].tobytes() for row in rows for stop in range(1, len(row) + 1)}
    assert [own.tokens for own in packed] == [len(distinct)]
    assert collate(packed[0]).input_ids.numel() == len(distinct) < 0.3 * whole[0].tokens


def test_a_token_trained_in_two_rows_counts_twice() -> None:
    """Two rollouts may sample the same answer; each row that trains a token has its own weight for it."""
    row = weighted_rows(3)[0]
    (batches,) = plan((row, row), 10**6, True)
    assert [own.tokens for own in batches] == [len(row)]
    logprobs, once = plain("qwen3", (row,))
    policy = PolicyModel(qwen3())
    own, _ = policy(collate(batches[0]))
    torch.testing.assert_close(own.detach(), logprobs[id(row)].repeat(2), **EXACT)
    (own * coefficient(row).repeat(2)).sum().backward()
    twice = {name: 2 * gradient for name, gradient in once.items()}
    assert_same(({}, gradients(policy.model)), ({}, twice))


def test_a_token_shared_as_context_is_trained_where_it_counts_only() -> None:
    """One rollout's rows: the first trains an answer that the second has as history."""
    row = weighted_rows(3)[0]
    later = replace(row.row, loss_mask=np.zeros(len(row) + 3, bool), logprobs=np.zeros(len(row) + 3, np.float32))
    later = replace(later, input_ids=np.append(row.row.input_ids, [5, 6, 7]).astype(np.int32))
    later.loss_mask[-1] = True
    rows = (row, replace(row, row=later))
    policy = PolicyModel(qwen3())
    (batches,) = plan(rows, 10**6, True)
    assert [own.tokens for own in batches] == [len(row) + 3]
    assert_same(run(policy, batches), plain("qwen3", rows))


@pytest.mark.parametrize("pack", [True, False])
def test_a_row_longer_than_the_budget_runs_alone_and_none_is_lost(pack: bool) -> None:
    rows = weighted_rows(1)
    alone = {row.row.input_ids[:1].tobytes(): row for row in rows}  # one of each tree: nothing to share
    for own, count in ((rows, len(rows)), (tuple(alone.values()), len(alone))):
        (batches,) = plan(own, 8, pack)
        assert sorted(id(row) for batch in batches for row in batch.rows) == sorted(map(id, own))
        assert not pack or len(batches) <= count
    assert all(len(batch.rows) == 1 for batch in batches if batch.tokens > 8)


def test_a_prefix_longer_than_the_budget_is_not_run_for_every_row() -> None:
    rows = make_minibatch(random_groups(1, groups=1, prefix=300), AlgorithmConfig(), None).rows
    (batches,) = plan(rows, 8, True)
    assert sorted(id(row) for own in batches for row in own.rows) == sorted(map(id, rows))
    assert len(batches) == 1 and 300 < batches[0].tokens <= 600


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 500), pack=st.booleans(), ranks=st.integers(1, 5))
def test_every_rank_runs_as_many_forwards(seed: int, budget: int, pack: bool, ranks: int) -> None:
    rows = weighted_rows(seed)
    planned = plan(rows, budget, pack, ranks)
    assert len(planned) == ranks and len({len(own) for own in planned}) == 1
    placed = [id(row) for own in planned for batch in own if not batch.filler for row in batch.rows]
    assert sorted(placed) == sorted(map(id, rows))
    for batch in (batch for own in planned for batch in own):
        assert batch.tokens == collate(batch).input_ids.numel()
        assert batch.tokens <= max(budget, 2 * max(map(len, batch.rows)))


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return made


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(MODELS))
def test_long_rows_are_exact_and_hold_nothing_of_their_length_squared(kind: str) -> None:
    """The prompts of whole harnesses are longer than any budget; attention must not write its scores down."""
    rows = make_minibatch(random_groups(5, groups=1, size=2, prefix=1500, longest=600), AlgorithmConfig(), None).rows
    policy = PolicyModel(model(kind))
    (batches,) = plan(rows, 64, policy.packs)
    with Largest() as largest:
        mine = run(policy, batches)
    assert_same(mine, plain(kind, rows))
    assert largest.elements < 1500 * 1500 / 2, "linear in the length, times the widest layer"


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_gradient_checkpointing_changes_nothing(kind: str) -> None:
    rows = weighted_rows(2)
    policy = PolicyModel(model(kind), gradient_checkpointing=True)
    for layer in policy.modules():
        if isinstance(layer, GradientCheckpointingLayer):  # the backward pass has no InDouble around it
            layer.forward = partial(call_in_double, layer.forward)
    (batches,) = plan(rows, 200, policy.packs)
    assert_same(run(policy, batches), plain(kind, rows))


def test_head_in_chunks_changes_nothing_and_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    tails = make_minibatch(random_groups(4, groups=1, prefix=2, longest=60), AlgorithmConfig(), None).rows
    rows = tuple(replace(row, row=replace(row.row, loss_mask=np.arange(len(row)) > 0)) for row in tails)
    monkeypatch.setattr(head, "chunk_tokens", lambda vocabulary: 5)
    policy = PolicyModel(qwen3())
    (batches,) = plan(rows, 10**6, True)
    with Largest() as largest:
        mine = run(policy, batches)
    assert_same(mine, plain("qwen3", rows))
    assert largest.elements < 97 * sum(row.row.trained_tokens for row in rows) / 1.5


def test_temperature_is_the_engines() -> None:
    rows = weighted_rows(5)
    (batches,) = plan(rows, 10**6, True)
    assert_same(run(PolicyModel(qwen3(), temperature=0.7), batches), plain("qwen3", rows, temperature=0.7))


def test_entropy_is_the_distributions() -> None:
    rows = weighted_rows(6)[:1]
    row = rows[0].row
    _, entropy = PolicyModel(qwen3())(collate(RowBatch(rows, True, len(rows[0]))))
    with torch.no_grad():
        logits = qwen3()(torch.from_numpy(row.input_ids.astype(np.int64))[None]).logits[0, :-1]
    expected = torch.distributions.Categorical(logits=logits).entropy()[torch.from_numpy(row.loss_mask[1:])]
    torch.testing.assert_close(entropy, expected, **EXACT)


def test_a_model_that_changes_its_logits_is_refused() -> None:
    changed = qwen3()
    changed.config.final_logit_softcapping = 30.0
    with pytest.raises(UserError, match="final_logit_softcapping"):
        PolicyModel(changed)

"""Every kernel of forest attention, values and gradients, against softmax under a dense mask."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeline.config import UserError
from pipeline.training import attention, prefix_tree
from pipeline.training.attention import AnyDevice, CpuFlash, GpuFlash, Kernel, choose_kernel
from pipeline.training.prefix_tree import Forest, build_forest

EXACT = {"rtol": 1e-9, "atol": 1e-9}
SCALE = 0.3


@pytest.fixture(autouse=True)
def share_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "LEAST_SHARED", 1)


def dense(query: Tensor, key: Tensor, value: Tensor, forest: Forest) -> Tensor:
    mask = torch.zeros(query.shape[2], query.shape[2], dtype=torch.bool)
    for places in forest.places:
        for position, place in enumerate(places):
            mask[place, torch.from_numpy(places[: position + 1])] = True
    key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], 1) for part in (key, value))
    scores = (query @ key.transpose(2, 3) * SCALE).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ value


def random_forest(seed: int, rows: int) -> Forest:
    rng = np.random.default_rng(seed)
    return build_forest([rng.integers(0, 2, rng.integers(1, 12)).astype(np.int32) for _ in range(rows)])


def assert_exact(kernel: Kernel, forest: Forest, groups: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, 2 * groups, len(forest.input_ids), 8), *[(1, 2, len(forest.input_ids), 8)] * 2]
    states = [
        torch.randn(shape, generator=generator, dtype=torch.float64).transpose(1, 2).contiguous().transpose(1, 2)
        for shape in shapes
    ]
    for part in states:
        part.requires_grad_()
    factor = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    mine = attention._ForestAttention.apply(*states, SCALE, forest.calls, kernel)
    other = dense(*states, forest)
    torch.testing.assert_close(mine, other, **EXACT)
    gradients = [torch.autograd.grad((output * factor).sum(), states) for output in (mine, other)]
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right, **EXACT)


@pytest.mark.parametrize("kernel", [CpuFlash(), AnyDevice()], ids=lambda kernel: type(kernel).__name__)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 6), groups=st.integers(1, 3))
def test_kernels_equal_softmax_under_a_mask(kernel: Kernel, seed: int, rows: int, groups: int) -> None:
    assert_exact(kernel, random_forest(seed, rows), groups, seed)


@pytest.mark.parametrize("scores", [1, 40])
def test_chunks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch, scores: int) -> None:
    monkeypatch.setattr(attention, "SCORES", scores)
    assert_exact(AnyDevice(), random_forest(3, 5), 2, 3)


def _spans(offsets: Tensor) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(offsets.tolist())]


def _weights(query: Tensor, key: Tensor, lse: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax over keys [heads, queries, keys], by the given or by its own log-sum-exp; both returned."""
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(query.shape[1] // key.shape[1], 1)) * scale
    if causal:
        assert query.shape[0] == key.shape[0]
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    lse = scores.logsumexp(-1) if lse is None else lse
    return (scores - lse[..., None]).exp(), lse


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_q: Tensor,
    cum_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    *,
    return_debug_mask: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    """What aten::_flash_attention_forward answers on a GPU: output [tokens, heads, d], log-sum-exp [heads, tokens]."""
    outputs, sums = [], []
    for own, seen in zip(_spans(cum_q), _spans(cum_k), strict=True):
        assert own.stop - own.start <= max_q and seen.stop - seen.start <= max_k and dropout == 0.0
        weights, lse = _weights(query[own], key[seen], None, causal, scale)
        copied = value[seen].repeat_interleave(query.shape[1] // key.shape[1], 1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, copied))
        sums.append(lse)
    return torch.cat(outputs), torch.cat(sums, 1), torch.empty(0), torch.empty(0), torch.empty(0)


def flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    cum_q: Tensor,
    cum_k: Tensor,
    *rest: Any,
    scale: float,
) -> tuple[Tensor, ...]:
    """What aten::_flash_attention_backward answers on a GPU."""
    gradients = [torch.zeros_like(part) for part in (query, key, value)]
    groups = query.shape[1] // key.shape[1]
    for own, seen in zip(_spans(cum_q), _spans(cum_k), strict=True):
        weights, _ = _weights(query[own], key[seen], lse[:, own], rest[3], scale)
        slope = torch.einsum("qhd,khd->hqk", gradient[own], value[seen].repeat_interleave(groups, 1))
        slope = weights * (slope - (gradient[own] * output[own]).sum(-1).T[..., None]) * scale
        gradients[0][own] += torch.einsum("hqk,khd->qhd", slope, key[seen].repeat_interleave(groups, 1))
        for index, states, others in ((1, slope, query), (2, weights, gradient)):
            part = torch.einsum("hqk,qhd->khd", states, others[own])
            gradients[index][seen] += part.unflatten(1, (-1, groups)).sum(2)
    return tuple(gradients)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 6), groups=st.integers(1, 3))
def test_the_gpu_path_up_to_its_kernel(seed: int, rows: int, groups: int) -> None:
    """All but the two CUDA operators themselves, which blocks of plain softmax stand in for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
        patch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward)
        assert_exact(GpuFlash(), random_forest(seed, rows), groups, seed)


def test_the_operators_of_the_gpu_path_take_what_it_gives() -> None:
    """Torch's own shape functions of the CUDA operators, on tensors without data."""
    query, key = torch.empty(7, 4, 8, device="meta"), torch.empty(7, 2, 8, device="meta")
    offsets = torch.empty(3, dtype=torch.int32, device="meta")
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, key, key, offsets, offsets, 4, 4, 0.0, True, return_debug_mask=False, scale=SCALE
    )
    assert output.shape == query.shape and lse.shape == (4, 7)


def test_a_kernel_for_every_device_and_type() -> None:
    assert isinstance(choose_kernel(torch.empty(1, 2, 3, 8)), CpuFlash)
    assert isinstance(choose_kernel(torch.empty(1, 2, 3, 8, device="meta")), AnyDevice)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "sliding_window"])
def test_attention_that_changes_its_scores_is_refused(name: str) -> None:
    states = torch.zeros(1, 1, 3, 8)
    with pytest.raises(UserError, match=name):
        attention.prefix_tree_attention(nn.Identity(), states, states, states, None, 1.0, (), **{name: 5.0})

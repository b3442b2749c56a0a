"""Attention over a packed forest of rows (prefix_tree), exact, with memory linear in the tokens.

A token sees its own segment so far and each segment above it: parts computed apart and joined by their log-sum-exp, as
in ring attention (arXiv 2310.01889). Handing the joined output and log-sum-exp to each part's backward gives exact
gradients, those of shared segments included. Registered as an attention function of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface

from pipeline.config import UserError
from pipeline.training.prefix_tree import Blocks

NAME = "prefix_tree"
UNKNOWN = ("softcap", "s_aux", "sliding_window")  # arguments that change the scores in a way not reproduced here
SCORES = 16 * 1024 * 1024  # scores that the path for any device writes down at once

Index: TypeAlias = slice | Tensor


@dataclass(frozen=True)
class States:
    """Queries, keys and values of one layer, each [1, heads or key heads, tokens, width]."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float

    @property
    def groups(self) -> int:
        """Query heads to a key head."""
        return self.query.shape[1] // self.key.shape[1]

    def at(self, queries: Index, keys: Index) -> States:
        """Some of the queries and of the keys."""
        return States(self.query[:, :, queries], self.key[:, :, keys], self.value[:, :, keys], self.scale)


@dataclass(frozen=True)
class Joined:
    """The output over all that a token sees [1, heads, tokens, width], its log-sum-exp, and the output's gradient."""

    output: Tensor
    lse: Tensor
    gradient: Tensor

    def at(self, queries: Index) -> Joined:
        """Those of some queries."""
        return Joined(self.output[:, :, queries], self.lse[:, :, queries], self.gradient[:, :, queries])


class Kernel(Protocol):
    """Attention of one Blocks, in as many parts as it likes; each part names its queries and keys."""

    def forward(self, states: States, blocks: Blocks) -> Iterator[tuple[Index, Tensor, Tensor]]:
        """Queries, their output and their log-sum-exp."""

    def backward(self, states: States, blocks: Blocks, joined: Joined) -> Iterator[tuple[Index, Index, list[Tensor]]]:
        """Queries, keys and the gradients of query, key and value."""


class SpanKernel:
    """One span of queries at a time; a subclass says how a span attends."""

    def forward(self, states: States, blocks: Blocks) -> Iterator[tuple[Index, Tensor, Tensor]]:
        """See Kernel."""
        for queries, keys in zip(blocks.queries, blocks.keys, strict=True):
            yield queries, *self.attend(states.at(queries, keys), blocks.causal)

    def backward(self, states: States, blocks: Blocks, joined: Joined) -> Iterator[tuple[Index, Index, list[Tensor]]]:
        """See Kernel."""
        for queries, keys in zip(blocks.queries, blocks.keys, strict=True):
            gradients = self.gradients(states.at(queries, keys), joined.at(queries), blocks.causal)
            yield queries, keys, gradients

    def attend(self, states: States, causal: bool) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""
        raise NotImplementedError

    def gradients(self, states: States, joined: Joined, causal: bool) -> list[Tensor]:
        """Gradients of query, key and value."""
        raise NotImplementedError


class CpuFlash(SpanKernel):
    """Torch's flash attention for CPUs, which wants as many key heads as query heads.

    Where nothing is causal, the queries of the heads that share a key head stand in one row; otherwise the keys are
    copied to their query heads.
    """

    def attend(self, states: States, causal: bool) -> tuple[Tensor, Tensor]:
        """See SpanKernel."""
        query, key, value = _equal_heads(states, causal)
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=states.scale
        )
        shape = states.query.shape
        return output.reshape(*shape[:3], -1), lse.reshape(shape[:3])

    def gradients(self, states: States, joined: Joined, causal: bool) -> list[Tensor]:
        """See SpanKernel."""
        query, key, value = _equal_heads(states, causal)
        output, gradient = (part.reshape(query.shape) for part in (joined.output, joined.gradient))
        own, *others = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, output, joined.lse.reshape(query.shape[:3]), 0.0, causal, scale=states.scale
        )
        if causal:
            others = [other.unflatten(1, (-1, states.groups)).sum(2) for other in others]
        return [own.reshape(states.query.shape), *others]


def _equal_heads(states: States, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    if causal:
        return states.query, *(part.repeat_interleave(states.groups, 1) for part in (states.key, states.value))
    _, heads, _, width = states.query.shape
    return states.query.reshape(1, heads // states.groups, -1, width), states.key, states.value


class AnyDevice(SpanKernel):
    """Plain operations on any device and type, a chunk of the queries at a time."""

    def attend(self, states: States, causal: bool) -> tuple[Tensor, Tensor]:
        """See SpanKernel."""
        outputs, lses = [], []
        for chunk in _chunks(states):
            scores = _scores(states, chunk, causal)
            lses.append(scores.logsumexp(-1))
            weights = (scores - lses[-1][..., None]).exp().to(states.value.dtype)
            outputs.append(weights @ _copied(states.value, states.groups))
        return torch.cat(outputs, 2), torch.cat(lses, 2)

    def gradients(self, states: States, joined: Joined, causal: bool) -> list[Tensor]:
        """See SpanKernel."""
        key, value = (_copied(part, states.groups) for part in (states.key, states.value))
        own, others = [], [torch.zeros_like(key), torch.zeros_like(value)]
        for chunk in _chunks(states):
            part = joined.at(chunk)
            weights = (_scores(states, chunk, causal) - part.lse[..., None]).exp()
            product = (part.gradient * part.output).sum(-1, keepdim=True)
            slope = (weights * (part.gradient @ value.transpose(2, 3) - product) * states.scale).to(key.dtype)
            own.append(slope @ key)
            others[0] += slope.transpose(2, 3) @ states.query[:, :, chunk]
            others[1] += weights.to(value.dtype).transpose(2, 3) @ part.gradient
        return [torch.cat(own, 2), *(other.unflatten(1, (-1, states.groups)).sum(2) for other in others)]


def _copied(states: Tensor, groups: int) -> Tensor:
    return states.repeat_interleave(groups, 1)


def _chunks(states: States) -> list[slice]:
    length = states.query.shape[2]
    size = max(1, SCORES // (states.query.shape[1] * states.key.shape[2]))
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _scores(states: States, queries: slice, causal: bool) -> Tensor:
    """Scaled scores of some queries, at least float32, minus infinity for keys after them."""
    scores = states.query[:, :, queries] @ _copied(states.key, states.groups).transpose(2, 3)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * states.scale
    if not causal:
        return scores
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(queries.start + 1)
    return scores.masked_fill(hidden, float("-inf"))


class GpuFlash:
    """Torch's flash attention for variable lengths: one call for all spans of a Blocks. Not run on a GPU yet."""

    def forward(self, states: States, blocks: Blocks) -> Iterator[tuple[Index, Tensor, Tensor]]:
        """See Kernel."""
        call = _VariableLengths.of(blocks, states.query.device)
        parts = states.at(call.queries, call.keys)
        output, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(_flat(part) for part in (parts.query, parts.key, parts.value)),
            *call.arguments,
            return_debug_mask=False,
            scale=states.scale,
        )
        yield call.queries, output.transpose(0, 1)[None], lse[None]

    def backward(self, states: States, blocks: Blocks, joined: Joined) -> Iterator[tuple[Index, Index, list[Tensor]]]:
        """See Kernel."""
        call = _VariableLengths.of(blocks, states.query.device)
        parts, seen = states.at(call.queries, call.keys), joined.at(call.queries)
        nothing = torch.zeros(2, dtype=torch.uint64, device=states.query.device)  # the state of dropout, which is off
        gradients = torch.ops.aten._flash_attention_backward(
            *(_flat(part) for part in (seen.gradient, parts.query, parts.key, parts.value, seen.output)),
            seen.lse[0].contiguous(),
            *call.arguments,
            nothing,
            torch.empty(0, device=states.query.device),
            scale=states.scale,
        )
        yield call.queries, call.keys, [gradient.transpose(0, 1)[None] for gradient in gradients]


def _flat(states: Tensor) -> Tensor:
    """[1, heads, tokens, width] -> [tokens, heads, width]."""
    return states[0].transpose(0, 1).contiguous()


@dataclass(frozen=True)
class _VariableLengths:
    """What flash attention for variable lengths wants to know of a Blocks."""

    queries: Tensor
    keys: Tensor
    arguments: tuple[Any, ...]  # offsets of queries and keys, longest of both, dropout, causal

    @classmethod
    def of(cls, blocks: Blocks, device: torch.device) -> _VariableLengths:
        spans = (blocks.queries, blocks.keys)
        lengths = [[span.stop - span.start for span in own] for own in spans]
        queries, keys = (torch.cat([torch.arange(span.start, span.stop) for span in own]).to(device) for own in spans)
        offsets = [torch.tensor([0, *accumulate(own)], dtype=torch.int32, device=device) for own in lengths]
        return cls(queries, keys, (*offsets, *map(max, lengths), 0.0, blocks.causal))


def choose_kernel(query: Tensor) -> Kernel:
    """By device, type and width of the heads."""
    if query.device.type == "cpu":
        return CpuFlash()
    half = query.dtype in (torch.float16, torch.bfloat16)
    if query.device.type == "cuda" and half and query.shape[-1] <= 256 and query.shape[-1] % 8 == 0:
        return GpuFlash()
    return AnyDevice()


class _ForestAttention(torch.autograd.Function):
    """Softmax of every token over its own path."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        calls: tuple[Blocks, ...],
        kernel: Kernel,
    ) -> Tensor:
        states = States(query, key, value, scale)
        output = torch.empty(*query.shape[:3], value.shape[-1], dtype=query.dtype, device=query.device)
        lse = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        own, *above = calls  # the first covers every token
        for queries, seen, seen_lse in kernel.forward(states, own):
            output[:, :, queries], lse[:, :, queries] = seen, seen_lse
        for blocks in above:
            for queries, seen, seen_lse in kernel.forward(states, blocks):
                _join(output, lse, queries, seen, seen_lse)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.rest = scale, calls, kernel
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        scale, calls, kernel = ctx.rest
        states, joined = States(query, key, value, scale), Joined(output, lse, gradients[0])
        own, keys, values = (torch.zeros_like(part) for part in (query, key, value))
        for blocks in calls:
            for at_queries, at_keys, parts in kernel.backward(states, blocks, joined):
                own[:, :, at_queries] += parts[0]
                keys[:, :, at_keys] += parts[1]
                values[:, :, at_keys] += parts[2]
        return own, keys, values, None, None, None


def _join(output: Tensor, lse: Tensor, queries: Index, seen: Tensor, seen_lse: Tensor) -> None:
    """Add what ``queries`` saw in one more part to what they saw before, weighted by the parts' sums."""
    before = lse[:, :, queries]
    total = torch.logaddexp(before, seen_lse)
    kept, new = ((part - total).exp()[..., None] for part in (before, seen_lse))
    output[:, :, queries] = (output[:, :, queries] * kept + seen * new).to(output.dtype)
    lse[:, :, queries] = total


def prefix_tree_attention(
    module: nn.Module,
    query: Float[Tensor, "rows heads length width"],
    key: Float[Tensor, "rows kv_heads length width"],
    value: Float[Tensor, "rows kv_heads length width"],
    attention_mask: Tensor | None,
    scaling: float,
    calls: tuple[Blocks, ...],
    **kwargs: Any,
) -> tuple[Float[Tensor, "rows length heads width"], None]:
    """Transformers' attention interface over one packed row; ``calls`` are those of its forest."""
    if changed := [name for name in UNKNOWN if kwargs.get(name) is not None]:
        raise UserError(f"cannot pack rows for {type(module).__name__}: its attention uses {', '.join(changed)}")
    output = _ForestAttention.apply(query, key, value, scaling, calls, choose_kernel(query))
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, prefix_tree_attention)

"""Causal attention of many short rows to one long shared prefix, exact and without copying the prefix to every row.

Prefix and row are attended to apart and joined by their log-sum-exp, as in ring attention (arXiv 2310.01889). Handing
the joined output and log-sum-exp to each part's flash backward gives exact gradients, those of the prefix included.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "shared_prefix"

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _JoinedAttention(torch.autograd.Function):
    """Softmax over [prefix, own row so far], by two flash kernels (CPU)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, prefix_key: Tensor, prefix_value: Tensor, scale: float
    ) -> Tensor:
        heads, kv_heads = query.shape[1], key.shape[1]
        query = query.contiguous()
        key, value = (states.repeat_interleave(heads // kv_heads, 1) for states in (key, value))
        own, own_lse = _forward(query, key, value, 0.0, True, scale=scale)
        folded = _fold(query, kv_heads)
        seen, seen_lse = _forward(folded, prefix_key, prefix_value, 0.0, False, scale=scale)
        seen, seen_lse = _unfold(seen, query.shape), _unfold(seen_lse[..., None], (*query.shape[:3], 1))[..., 0]
        lse = torch.logaddexp(own_lse, seen_lse)
        output = own * (own_lse - lse).exp()[..., None] + seen * (seen_lse - lse).exp()[..., None]
        ctx.save_for_backward(query, key, value, folded, prefix_key, prefix_value, output, lse)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, folded, prefix_key, prefix_value, output, lse = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        kv_heads = prefix_key.shape[1]
        query_gradient, *own = _backward(gradient, query, key, value, output, lse, 0.0, True, scale=ctx.scale)
        folded_lse = _fold(lse[..., None], kv_heads)[..., 0]
        folded_gradient, *prefix = _backward(
            _fold(gradient, kv_heads),
            folded,
            prefix_key,
            prefix_value,
            _fold(output, kv_heads),
            folded_lse,
            0.0,
            False,
            scale=ctx.scale,
        )
        key_gradient, value_gradient = (states.unflatten(1, (kv_heads, -1)).sum(2) for states in own)
        query_gradient = query_gradient + _unfold(folded_gradient, query.shape)
        return query_gradient, key_gradient, value_gradient, *prefix, None


def _fold(states: Tensor, kv_heads: int) -> Tensor:
    """[rows, heads, length, d] -> [1, kv_heads, rows·heads/kv_heads·length, d]: a key head's queries in a row."""
    rows, width = states.shape[0], states.shape[-1]
    return states.reshape(rows, kv_heads, -1, width).transpose(0, 1).reshape(1, kv_heads, -1, width)


def _unfold(states: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """The inverse of ``_fold``; ``shape`` is the unfolded one."""
    rows, _, _, width = shape
    return states.view(states.shape[1], rows, -1, width).transpose(0, 1).reshape(shape)


def _masked_attention(
    query: Tensor, key: Tensor, value: Tensor, prefix_key: Tensor, prefix_value: Tensor, scale: float
) -> Tensor:
    """The same on any device: the prefix is copied to every row and a mask tells the two parts apart."""
    rows, heads, length, _ = query.shape
    prefix = prefix_key.shape[2]
    key = torch.cat([prefix_key.expand(rows, -1, -1, -1), key], dim=2)
    value = torch.cat([prefix_value.expand(rows, -1, -1, -1), value], dim=2)
    key, value = (states.repeat_interleave(heads // key.shape[1], 1) for states in (key, value))
    mask = torch.ones(length, prefix + length, dtype=torch.bool, device=query.device).tril(prefix)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def shared_prefix_attention(
    module: nn.Module,
    query: Float[Tensor, "rows heads length d"],
    key: Float[Tensor, "rows kv_heads length d"],
    value: Float[Tensor, "rows kv_heads length d"],
    attention_mask: Tensor | None,
    scaling: float,
    prefix_states: list[tuple[Tensor, Tensor]] | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "rows length heads d"], None]:
    """Transformers' attention interface. ``prefix_states``: keys and values [1, kv_heads, prefix, d] of each layer."""
    if prefix_states is None:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    else:
        prefix_key, prefix_value = prefix_states[module.layer_idx]
        attend = _JoinedAttention.apply if query.device.type == "cpu" else _masked_attention
        output = attend(query, key, value, prefix_key, prefix_value, scaling)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, shared_prefix_attention)

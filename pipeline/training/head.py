"""The head of a model and its softmax as one operation: logprobs of given tokens, never all logits at once.

Logits exist for a chunk of tokens only. The backward pass computes them again and adds every chunk to one gradient of
the weight, so memory does not grow with the number of chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from transformers import PreTrainedModel

from pipeline.config import UserError

LOGITS = 4 * 1024 * 1024  # of one chunk, 16 MiB in float32, unless that were too few tokens:
LEAST_TOKENS = 256  # every chunk reads and writes the weight's whole gradient


class Head(nn.Linear):
    """A linear head that answers with logprobs and entropies when it is given targets, with logits otherwise.

    It is one module with its parameters, so that ZeRO-3's hooks gather them for it.
    """

    def forward(
        self,
        hidden: Float[Tensor, "tokens width"],
        targets: Int[Tensor, "tokens"] | None = None,
        temperature: float = 1,
    ) -> Any:
        """Logprobs (with gradient) and entropies (without), at least float32."""
        if targets is None:
            return super().forward(hidden)
        size = chunk_tokens(self.out_features)
        return _Logprobs.apply(hidden, self.weight, self.bias, targets, temperature, size)


def replace_head(model: PreTrainedModel) -> None:
    """Give ``model`` a Head with the parameters of its own; raises UserError for a head that is not linear."""
    own = model.get_output_embeddings()
    if type(own) not in (nn.Linear, Head):
        raise UserError(
            f"cannot train {model.config.model_type}: its head is a {type(own).__name__}, not a plain Linear"
        )
    head = Head(own.in_features, own.out_features, own.bias is not None, device="meta")
    head.weight, head.bias = own.weight, own.bias
    model.set_output_embeddings(head)


def chunk_tokens(vocabulary: int) -> int:
    """Tokens whose logits are held at once."""
    return max(LEAST_TOKENS, LOGITS // vocabulary)


class _Logprobs(torch.autograd.Function):
    """log softmax(hidden · weightᵀ + bias, over temperature) at the targets, and the distribution's entropy."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, size: int
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy, lse = hidden.new_empty(3, len(hidden), dtype=wide)
        for chunk in _chunks(len(hidden), size):
            scores = _scores(hidden[chunk], weight, bias, temperature)
            lse[chunk] = scores.logsumexp(-1)
            scores -= lse[chunk, None]
            logprobs[chunk] = scores.gather(-1, targets[chunk, None])[:, 0]
            entropy[chunk] = -(scores.exp() * scores).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, lse)
        ctx.rest = temperature, size
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse = ctx.saved_tensors
        temperature, size = ctx.rest
        own = torch.empty_like(hidden)
        weights, biases = (
            torch.zeros_like(part, dtype=lse.dtype) if needed else None
            for part, needed in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        )
        for chunk in _chunks(len(hidden), size):
            slope = _scores(hidden[chunk], weight, bias, temperature).sub_(lse[chunk, None]).exp_()
            step = gradient[chunk, None] / temperature
            slope = slope.mul_(-step).scatter_add_(-1, targets[chunk, None], step).to(hidden.dtype)
            own[chunk] = slope @ weight
            if weights is not None:
                weights += slope.T @ hidden[chunk]
            if biases is not None:
                biases += slope.sum(0)
        narrow = (part if part is None else part.to(hidden.dtype) for part in (weights, biases))
        return own, *narrow, None, None, None


def _chunks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, length, size))


def _scores(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Logits over the temperature, at least float32; a tensor of its own."""
    logits = linear(hidden, weight, bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)

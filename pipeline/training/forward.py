"""Log-probabilities and entropy of the trained tokens of a micro-batch, as the one module that goes through DeepSpeed.

A model whose every layer is full attention runs packed rows, prefixes that they share once (prefix_tree). Any other
(convolution, linear attention, sliding window) runs padded rows: its code carries a state over the boundaries of packed
ones, at least without fused kernels. Both are exact: padding is on the right, every layer is causal.
"""

from __future__ import annotations

import logging
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from pipeline.config import UserError
from pipeline.training import attention
from pipeline.training.batch import MicroBatch
from pipeline.training.head import replace_head

logger = logging.getLogger(__name__)

LOGIT_CHANGERS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "logits_scale")


class PolicyModel(nn.Module):
    """A causal language model that answers with trained tokens' logprobs instead of logits.

    ``temperature`` is the one the engine samples with, so that both speak of the same distribution.
    Raises UserError for a model that changes its logits after the head in a way not reproduced here.
    """

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        changed = [name for name in LOGIT_CHANGERS if getattr(model.config, name, None) not in (None, 0, 1, 1.0)]
        if changed:
            raise UserError(f"cannot train {model.config.model_type}: its logits are changed by {', '.join(changed)}")
        self.model = model
        self.temperature = temperature
        self.packs = is_pure_attention(model)
        if self.packs:
            model.set_attn_implementation(attention.NAME)
        else:
            logger.warning(
                "%s has layers other than full attention: rows run padded side by side, not packed, no prefix shared",
                model.config.model_type,
            )
        replace_head(model)
        _disable_dropout(model)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.train(gradient_checkpointing)  # transformers recomputes activations in training mode only

    def forward(self, batch: MicroBatch) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
        """Logprobs (with gradient) and entropies (without), at least float32, in the order of ``batch.behaviour``."""
        packing = {} if batch.calls is None else {"position_ids": batch.position_ids, "calls": batch.calls}
        hidden = self.model.base_model(batch.input_ids, use_cache=False, **packing).last_hidden_state
        head = self.model.get_output_embeddings()
        logprobs, entropy = head(hidden.flatten(0, 1)[batch.predictors], batch.targets, self.temperature)
        return logprobs, entropy


def is_pure_attention(model: PreTrainedModel) -> bool:
    """Whether every layer keeps plain keys and values, so that packing takes no more than another attention."""
    if getattr(model, "_is_stateful", False) or not getattr(model, "_supports_attention_backend", False):
        return False
    layers: list[Any] = DynamicCache(config=model.config).layers
    return all(type(layer) is DynamicLayer for layer in layers)


def _disable_dropout(model: nn.Module) -> None:
    """The ratio π/μ compares two forwards of one policy; dropout would make it noise."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0

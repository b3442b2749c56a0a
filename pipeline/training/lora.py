"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft: put into a frozen model, merged into it for engine and exports.

The model keeps its class and its names; only its linear layers are replaced. What leaves the trainer is W + s·B·A,
computed in float32 at least and rounded once, so an engine needs to know nothing of adapters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.config import LoraConfig, UserError

ADAPTER_DIRECTORY = "adapter"
NAME = "default"  # peft's own name for an only adapter
PEFT_PREFIX = "base_model.model."  # of names in peft's adapter files


@dataclass(frozen=True)
class Weight:
    """A weight under the name that the model's own checkpoint gives it; ``factors`` are A and B of its adapter."""

    name: str
    base: nn.Parameter
    factors: tuple[nn.Parameter, ...] = ()
    scale: float = 0.0

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What must be at hand, whole, for ``value``."""
        return [self.base, *self.factors]

    def value(self) -> Tensor:
        """The weight that the policy computes with."""
        if not self.factors:
            return self.base.detach()
        wide = torch.promote_types(self.base.dtype, torch.float32)
        down, up = (factor.detach().to(wide) for factor in self.factors)
        return (self.base.detach().to(wide) + self.scale * (up @ down)).to(self.base.dtype)


def attach(model: PreTrainedModel, settings: LoraConfig) -> None:
    """Freeze ``model`` and give its ``settings.targets`` adapters that change nothing yet.

    Raises UserError for targets that it does not have.
    """
    assert settings.rank is not None
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    peft_config = PeftConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft divides it by the rank, whole or not
        target_modules=_targets(model, settings.targets),
        lora_dropout=0.0,  # the ratio π/μ compares two forwards of one policy
        task_type="CAUSAL_LM",
    )
    inject_adapter_in_model(peft_config, model, adapter_name=NAME)
    model.register_state_dict_post_hook(_drop_tied)


def _drop_tied(model: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Second names of frozen weights leave the state: DeepSpeed leaves a tied head in, at the size of the embedding."""
    first = {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in first and not parameter.requires_grad:
            state.pop(prefix + name, None)


def _targets(model: PreTrainedModel, wanted: Iterable[str]) -> list[str]:
    head = model.get_output_embeddings()
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    known = sorted({name.rpartition(".")[2] for name in linear})
    chosen = list(wanted) or known
    if unknown := [name for name in chosen if name not in known]:
        raise UserError(
            f"training.lora.targets: {model.config.model_type} has no linear layer called {', '.join(unknown)}; "
            f"its linear layers are {', '.join(known)}"
        )
    return chosen


def weights(model: nn.Module) -> list[Weight]:
    """Every weight of the model, merged where it has an adapter; a tied head is the embedding only."""
    layers: dict[str, Any] = _layers(model)
    adapters = {id(parameter) for layer in layers.values() for parameter in _factors(layer)}
    found = []
    for name, parameter in model.named_parameters():
        if id(parameter) in adapters:
            continue
        layer = layers.get(name.removesuffix(".base_layer.weight"))
        plain = name.replace(".base_layer.", ".")
        own = (_factors(layer), layer.scaling[NAME]) if layer else ()
        found.append(Weight(plain, parameter, *own))
    return found


def changed_weights(model: nn.Module) -> list[Weight]:
    """What an engine that serves the base model lacks: all weights, or those of the blocks that hold adapters.

    Blocks and not matrices: vLLM loads the matrices that it has fused (q, k and v; gate and up) together or not at all.
    """
    blocks = tuple({name.removesuffix(name.rpartition(".")[2]) for name in _layers(model)})
    return [weight for weight in weights(model) if not blocks or weight.name.startswith(blocks)]


def adapter_weights(model: nn.Module) -> list[Weight]:
    """A and B of every adapter, as peft's files name them; empty for a model without adapters."""
    layers = _layers(model).values()
    adapters = {id(parameter) for layer in layers for parameter in _factors(layer)}
    named = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) in adapters]
    return [Weight(PEFT_PREFIX + name.replace(f".{NAME}.", "."), parameter) for name, parameter in named]


def _layers(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def _factors(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    return layer.lora_A[NAME].weight, layer.lora_B[NAME].weight


def write_adapter(model: PreTrainedModel, adapter: Mapping[str, Tensor], base: Path, place: Path) -> None:
    """A directory that ``peft.PeftModel.from_pretrained`` puts on the model in ``base``."""
    place.mkdir()
    save_file(dict(adapter), place / "adapter_model.safetensors", {"format": "pt"})
    config = {**model.peft_config[NAME].to_dict(), "base_model_name_or_path": str(base), "inference_mode": True}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    (place / "adapter_config.json").write_text(json.dumps(plain, indent=2, sort_keys=True) + "\n")

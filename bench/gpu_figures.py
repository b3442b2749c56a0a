"""What the steps of `make gpu-smoke` are told, and what they tell."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Setting:
    """Where and how large. ``length``: tokens of the longest row; ``scale``: tokens of a turn in the packed rows."""

    device: torch.device
    dtype: torch.dtype
    scratch: Path
    length: int = 131_072
    scale: int = 256
    transfer: str = "file"


@dataclass(frozen=True)
class Figure:
    """A measured value; with a ``limit`` it must not be above it. Not a number is above every limit."""

    name: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def holds(self) -> bool:
        return self.limit is None or self.value <= self.limit

"""The trainer's process group: gloo (NCCL beside it on GPU) from the launcher's environment, or one process alone."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)  # a rank that waits longer in a collective fails, and the attempt with it


def initialise() -> torch.device:
    """Join the group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT name, or be one alone; return the device."""
    os.environ.setdefault("LOCAL_RANK", "0")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            dist.init_process_group(_backend(cuda), timeout=TIMEOUT)
        else:
            join_group(cuda, dist.HashStore(), 0, 1)
    return device


def join_group(cuda: bool, store: dist.Store, rank: int, ranks: int) -> None:
    """Be ``rank`` of the ``ranks`` that meet in ``store``, before `initialise`."""
    dist.init_process_group(_backend(cuda), store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)


def _backend(cuda: bool) -> str:
    return "cpu:gloo,cuda:nccl" if cuda else "gloo"


def from_rank_zero(value: T) -> T:
    """Rank 0's ``value``, on every rank."""
    if dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def from_all_ranks(value: T) -> list[T]:
    """Every rank's ``value``, by rank, on every rank; also a barrier."""
    if dist.get_world_size() == 1:
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return cast("list[T]", values)


def first_error(error: str | None) -> str | None:
    """The first rank's error that is not None, on every rank; also a barrier."""
    return next((found for found in from_all_ranks(error) if found is not None), None)


def reduce(values: Mapping[str, float], operation: Any) -> dict[str, float]:
    """Sum or maximum of each value over all ranks; every rank passes the same names in the same order."""
    tensor = torch.tensor(list(values.values()), dtype=torch.float64)
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor, op=operation)
    return dict(zip(values, tensor.tolist(), strict=True))


def add_up(values: Tensor) -> Tensor:
    """The sum of every rank's ``values``, which have one shape, on every rank."""
    if dist.get_world_size() == 1:
        return values
    total = values.clone()
    dist.all_reduce(total)
    return total


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """The state of every random generator of this process."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Put back what ``random_state`` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])

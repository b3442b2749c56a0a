"""What one trainer process among several does in test_ranks.py."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.utils import safe_get_full_optimizer_state
from training_helpers import partition_all, random_groups, weights

from pipeline.config import AlgorithmConfig, LoraConfig, TrainingConfig
from pipeline.training import checkpoint, head
from pipeline.training.trainer import Trainer


class Layout(NamedTuple):
    """How the ranks train together; ``adapters`` is the rank of LoRA."""

    zero_stage: int
    offload: str = "none"
    adapters: int | None = None

    def __str__(self) -> str:
        return f"{self.zero_stage}-{self.offload}-{self.adapters}"


def layout_trainer(model: Path, layout: Layout, token_budget: int = 60) -> Trainer:
    settings = {"zero_stage": layout.zero_stage, "offload": layout.offload, "lora": LoraConfig(rank=layout.adapters)}
    training = TrainingConfig(learning_rate=5e-4, token_budget=token_budget, **settings)
    return Trainer(model, training, AlgorithmConfig(minibatches=1), 0, 4)


def update(trainer: Trainer, seed: int) -> dict[str, float]:
    return trainer.update(random_groups(seed) if trainer.rank == 0 else None)


def train_layouts(model: Path, out: Path, layouts: Sequence[Layout], resume: bool) -> None:
    """Two updates in each layout, a checkpoint and an export after the first; with ``resume`` the second once more."""
    partition_all()
    head.chunk_tokens = lambda _: 16  # so that the head takes several turns
    for layout in layouts:
        place = out / str(layout)
        trainer = layout_trainer(model, layout)
        metrics = [update(trainer, 0)]
        trainer.save(place / "checkpoints", {"count": 1})
        trainer.export(place / "export")
        metrics.append(update(trainer, 1))
        trained = weights(trainer)
        if resume:
            again = layout_trainer(model, layout)
            assert again.load(place / "checkpoints") == {"count": 1}
            update(again, 1)
            changed = [name for name, value in weights(again).items() if not torch.equal(value, trained[name])]
            assert not changed, (str(layout), changed)
        if trainer.rank == 0:
            torch.save((metrics, trained), place / "result.pt")


def first_gradients(model: Path, out: Path, token_budget: int, algorithms: Mapping[str, Mapping[str, Any]]) -> None:
    """Metrics and first moment of the first step under each of ``algorithms``."""
    results = {}
    for name, settings in algorithms.items():
        training = TrainingConfig(token_budget=token_budget, max_grad_norm=0.0)
        trainer = Trainer(model, training, AlgorithmConfig(minibatches=1, **settings), 0, 4)
        metrics = update(trainer, 0)
        first = [safe_get_full_optimizer_state(value, "exp_avg") for value in trainer.policy.parameters()]
        results[name] = metrics, torch.cat([moment.flatten() for moment in first]).double()
    if trainer.rank == 0:
        torch.save(results, out / "gradients.pt")


def save_on_a_full_disk(model: Path, root: Path) -> None:
    """Rank 1 cannot write the whole of its part of the second checkpoint; the third one works."""
    trainer = Trainer(model, TrainingConfig(zero_stage=2), AlgorithmConfig(), 0, 4)
    trainer.save(root, {"count": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if trainer.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, limits[1]))
    refused = False
    try:
        trainer.save(root, {"count": 2})
    except checkpoint.CheckpointError:
        refused = True
    assert refused
    if trainer.rank == 0:  # nobody goes on without it
        assert [path.name for path in root.iterdir()] == ["0000-000001-update-000000"]
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    trainer.save(root, {"count": 3})
    assert trainer.load(root) == {"count": 3}

"""Stage 4 by itself: one policy-gradient update on whole groups, from the newest checkpoint to the next.

`yoke train` makes the same update inside its loop (`launch/trainer_rank.py`) and pushes the weights into the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.config import Config
from pipeline.records import TrainGroup
from pipeline.stages.flow import Ending, FlowState
from pipeline.training.checkpoint import newest
from pipeline.training.trainer import Trainer


def open_trainer(config: Config) -> Trainer:
    """The trainer with the base model's weights; ``load`` brings it to a checkpoint."""
    temperature = config.harness.sampling.temperature
    return Trainer(
        config.model.path, config.training, config.algorithm, config.seed, config.algorithm.updates, temperature
    )


def update_once(config: Config, checkpoints: Path, groups: Sequence[TrainGroup]) -> tuple[dict[str, float], Path]:
    """Returns the update's metrics and the new checkpoint, in which the groups count as trained."""
    trainer = open_trainer(config)
    state = trainer.load(checkpoints) or {"flow": FlowState().to_json(), "wall_s": {}, "rollouts": 0}
    flow = FlowState.from_json(state["flow"])
    metrics = trainer.update(groups)
    flow.ended |= {group.group_id: [Ending.TRAINED, f"update {flow.update}"] for group in groups}
    flow.update += 1
    flow.version_n += 1
    trainer.save(checkpoints, state | {"flow": flow.to_json()})
    place = newest(checkpoints)
    assert place is not None
    return metrics, place


def export_newest(config: Config, checkpoints: Path, models: Path) -> tuple[str, Path]:
    """(label, directory) of weights that vLLM loads: the newest checkpoint's, or the base model's before the first."""
    checkpoint = newest(checkpoints)
    if checkpoint is None:
        return "base", Path(config.model.path)
    place = models / checkpoint.name
    if not place.exists():
        trainer = open_trainer(config)
        trainer.load(checkpoints)
        trainer.export(place)
    return checkpoint.name, place

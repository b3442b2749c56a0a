"""Stage 4 by itself: one policy-gradient update on whole groups, from the newest checkpoint to the next.

`yoke train` makes the same update inside its loop (`launch/trainer_rank.py`) and pushes the weights into the live engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.config import Config
from pipeline.records import TrainGroup
from pipeline.stages.flow import Ending, FlowState
from pipeline.training.checkpoint import latest_checkpoint
from pipeline.training.trainer import Trainer


def open_trainer(config: Config, checkpoints: Path) -> tuple[Trainer, dict[str, object]]:
    """The trainer at the newest checkpoint, and the state kept beside its weights (a fresh one before the first)."""
    trainer = Trainer(config.model.path, config.training, config.algorithm, config.seed, config.algorithm.updates)
    newest = latest_checkpoint(checkpoints)
    if newest is None:
        return trainer, {"flow": FlowState().to_json(), "wall_s": {}, "rollouts": 0}
    return trainer, trainer.load(newest)


def update_once(config: Config, checkpoints: Path, groups: Sequence[TrainGroup]) -> tuple[dict[str, float], Path]:
    """Returns the update's metrics and the new checkpoint, in which the groups count as trained."""
    trainer, state = open_trainer(config, checkpoints)
    flow = FlowState.from_json(dict(state["flow"]))  # type: ignore[call-overload]
    metrics = trainer.update(groups)
    flow.ended |= {group.group_id: [Ending.TRAINED, f"update {flow.update}"] for group in groups}
    flow.update += 1
    flow.version_n += 1
    place = checkpoints / f"update-{flow.update:06d}"
    trainer.save(place, state | {"flow": flow.to_json()})
    return metrics, place


def export_newest(config: Config, checkpoints: Path, models: Path) -> tuple[str, Path]:
    """(label, directory) of weights that vLLM loads: the newest checkpoint's, or the base model's before the first."""
    newest = latest_checkpoint(checkpoints)
    if newest is None:
        return "base", Path(config.model.path)
    place = models / newest.name
    if not place.exists():
        trainer, _ = open_trainer(config, checkpoints)
        trainer.export(place)
    return newest.name, place

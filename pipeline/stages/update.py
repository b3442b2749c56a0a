"""Stage 4 by itself: one policy-gradient update on whole groups, from the newest checkpoint to the next.

`yoke train` makes the same update inside its loop (`launch/trainer_rank.py`) and pushes the weights into the engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.config import Config, UserError
from pipeline.records import TrainGroup
from pipeline.stages.difficulty import count, seen_in
from pipeline.stages.flow import Ending, FlowState
from pipeline.stages.weights import NEWEST, kept, model_dir, select
from pipeline.training.checkpoint import STATE_FILE, newest
from pipeline.training.trainer import Trainer


def open_trainer(config: Config) -> Trainer:
    """The trainer with the base model's weights; ``load`` brings it to a checkpoint."""
    temperature = config.harness.sampling.temperature
    return Trainer(
        config.model.path, config.training, config.algorithm, config.seed, config.training.updates, temperature
    )


def fresh_state() -> dict[str, Any]:
    """What stands beside the weights before the first checkpoint."""
    return {"flow": FlowState().to_json(), "wall_s": {}, "rollouts": 0}


def read_flow(checkpoints: Path) -> FlowState:
    """The flow's state in the newest checkpoint."""
    checkpoint = newest(checkpoints)
    state = json.loads((checkpoint / STATE_FILE).read_text())["state"] if checkpoint else fresh_state()
    return FlowState.from_json(state["flow"])


def update_once(config: Config, checkpoints: Path, groups: Sequence[TrainGroup]) -> tuple[dict[str, float], Path]:
    """Returns the update's metrics and the new checkpoint, in which the groups count as trained.

    Raises UserError when one of them was trained before.
    """
    trainer = open_trainer(config)
    state = trainer.load(checkpoints) or fresh_state()
    flow = FlowState.from_json(state["flow"])
    again = sorted(group.group_id for group in groups if group.group_id in flow.ended)
    if again:
        raise UserError(f"{', '.join(again)} ended in an earlier update: no group is trained twice")
    metrics = trainer.update(groups)
    flow.ended |= {group.group_id: [Ending.TRAINED, f"update {flow.update}"] for group in groups}
    for group in groups:
        seen = seen_in(group.rollouts, contrast=True)
        count(flow.difficulty, group.harness, group.rollouts[0].task_id, seen)
    flow.update += 1
    flow.version_n += 1
    trainer.save(checkpoints, state | {"flow": flow.to_json()})
    place = newest(checkpoints)
    assert place is not None
    return metrics, place


def export_newest(config: Config, checkpoints: Path, models: Path) -> tuple[str, Path]:
    """(label, directory) of weights that vLLM loads: the newest checkpoint's, or the base model's before the first."""
    (name,) = select(NEWEST, kept(checkpoints, models))
    return name, model_dir(config, checkpoints, models, name)

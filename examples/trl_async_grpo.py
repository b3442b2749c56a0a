"""Train with TRL's AsyncGRPOTrainer on rollouts in real coding agents. What it needs: docs/trl.md.

python examples/trl_async_grpo.py http://127.0.0.1:8000 model.path=Qwen/Qwen3-8B tasks=harbor tasks.train=my-tasks
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from pipeline.cli import compose_config
from pipeline.config import Config, UserError
from pipeline.stages.trl_samples import prompts, trl_settings
from pipeline.stages.trl_worker import YokeRolloutWorker
from pipeline.tasks.harbor import HarborTask, load_tasks


def make_trainer(
    config: Config, tasks: Sequence[HarborTask], engine_url: str, weight_transfer: Any = None, **settings: Any
) -> AsyncGRPOTrainer:
    """``settings`` go to AsyncGRPOConfig: batch size, steps, logging. ``weight_transfer``: None is TRL's own, NCCL."""
    return AsyncGRPOTrainer(
        model=config.model.path,
        args=AsyncGRPOConfig(config.run_dir, vllm_server_base_url=engine_url, **(trl_settings(config) | settings)),
        train_dataset=prompts(tasks),
        rollout_worker=YokeRolloutWorker(config, tasks, engine_url),
        weight_transfer=weight_transfer,
    )


def main(engine_url: str, *overrides: str) -> None:
    """Train with Yoke's settings ``overrides``; what is TRL's is set here."""
    config = compose_config(overrides)
    if config.tasks.train is None:
        raise UserError("tasks.train is not given: a directory of task directories, tasks=harbor tasks.train=my-tasks")
    tasks = load_tasks(config.tasks.train)
    make_trainer(config, tasks, engine_url, per_device_train_batch_size=8, gradient_accumulation_steps=1).train()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except UserError as error:
        sys.exit(str(error))

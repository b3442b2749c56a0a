"""What passes between Yoke and TRL: settings, and groups of rollouts as the samples of ``AsyncGRPOTrainer``.

TRL is imported only when a sample is made. Written for TRL 1.16.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from pipeline.config import Config, UserError
from pipeline.records import RolloutRecord, TrainGroup
from pipeline.stages.advantage import graded_rewards
from pipeline.stages.flow import oldest_version
from pipeline.tasks.harbor import HarborTask
from pipeline.training.loss_weights import AGGREGATIONS

POSSIBLE: dict[str, tuple[Any, ...]] = {  # what would otherwise be left out without a word
    "algorithm.loss": ("ppo_clip",),
    "algorithm.aggregation": ("group_mean", "rollout_mean", "token_mean"),
    "algorithm.decoupled": (False,),
    "curriculum.enabled": (False,),
    "training.lora.rank": (None,),
}


def trl_settings(config: Config) -> dict[str, Any]:
    """The arguments of ``AsyncGRPOConfig`` that Yoke's settings decide. Temperature and dtype must be vLLM's own."""
    algorithm, training = config.algorithm, config.training
    return {
        "temperature": config.harness.sampling.temperature,
        "dtype": config.model.dtype,
        "epsilon": algorithm.clip_low,
        "epsilon_high": algorithm.clip_high,
        "num_generations": algorithm.group_size,
        "max_staleness": algorithm.max_staleness,
        "learning_rate": training.learning_rate,
        "adam_beta1": training.betas[0],
        "adam_beta2": training.betas[1],
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.max_grad_norm,
        "seed": config.seed,
    }


def check_settings(config: Config) -> None:
    """Raise UserError for a setting that cannot be had with TRL's trainer."""
    for knob, possible in POSSIBLE.items():
        if (value := attrgetter(knob)(config)) not in possible:
            raise UserError(f"{knob}={value}: with TRL's trainer only {', '.join(map(str, possible))} will do")


def prompts(tasks: Sequence[HarborTask]) -> Any:
    """A ``datasets.Dataset`` for ``train_dataset``, by whose length TRL counts epochs: the tasks' instructions."""
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [[{"role": "user", "content": task.instruction}] for task in tasks]})


def samples(group: TrainGroup, number: int, prompt: str, config: Config) -> list[Any]:
    """A group as TRL's ``RolloutSample``s, one a row, all of the group's oldest version. ``prompt`` is only shown.

    Ids and mask are int64 [L], sampled logprobs float32 [L], 0 on context. TRL's loss is linear in the advantage's size
    and weighs all tokens of a micro-batch the same, so the advantage carries the aggregation: it is multiplied by
    C/T̄_g for ``group_mean``, by C/T_i for ``rollout_mean``, C being ``constant_tokens``.
    """
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    spread = float(np.std(graded_rewards(group.rollouts)))
    return [
        RolloutSample(
            prompt=[{"role": "user", "content": prompt}],
            completion=[],
            input_ids=row.input_ids.astype(np.int64),
            completion_mask=row.loss_mask.astype(np.int64),
            old_log_probs=np.where(row.loss_mask, row.logprobs, 0).astype(np.float32),
            advantage=advantage * scale,
            model_version=oldest_version(group).n,
            group_id=number,
            metrics=_metrics(record, spread, scale),
            enqueued_at=time.time(),
        )
        for record, advantage, scale in zip(group.rollouts, group.advantages, _scales(group, config), strict=True)
        for row in record.rows
    ]


def _metrics(record: RolloutRecord, reward_std: float, scale: float) -> dict[str, float]:
    """TRL's names; it takes their means over rows."""
    return {
        "reward": float(record.verdict.reward or 0.0),
        "reward_std": reward_std,
        "tools/call_frequency": float(record.verdict.tool_calls),
        "sample/loss_weight": scale,
    }


def _scales(group: TrainGroup, config: Config) -> list[float]:
    """What each rollout's advantage is multiplied by: with it, TRL's equal weights become the aggregation's."""
    algorithm = config.algorithm
    if algorithm.aggregation == "token_mean":
        return [1.0] * len(group.rollouts)
    (weights,) = AGGREGATIONS[algorithm.aggregation]([group], algorithm)
    return [algorithm.constant_tokens * len(group.rollouts) * weight for weight in weights]

"""DeepSpeed around a policy: ZeRO stages 0 to 3, with or without CPU offload; and what has to be seen to in its ways.

Which stage when: docs/training.md.
"""

from __future__ import annotations

import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
from torch import nn

from pipeline.config import TrainingConfig
from pipeline.training.checkpoint import WRITE_FAILURES


def make_engine(policy: nn.Module, training: TrainingConfig) -> Any:
    """DeepSpeed with torch's AdamW; ``step()`` ends an accumulation, and nothing is rescaled.

    Weights in bfloat16 get a float32 master copy.
    """
    import deepspeed

    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        lr=training.learning_rate,
        betas=(training.betas[0], training.betas[1]),
        weight_decay=training.weight_decay,
        fused=training.offload != "none" or None,  # one pass over CPU memory; DeepSpeed's own has to be compiled
    )
    half = next(policy.parameters()).dtype == torch.bfloat16
    if _is_plain(training, half):
        clip_and_keep_norm(optimizer, trained, training.max_grad_norm)
    compile_nothing()
    with quiet_deepspeed():
        engine, *_ = deepspeed.initialize(model=policy, optimizer=optimizer, config=deepspeed_config(training, half))
    if half and training.zero_stage == 0:
        optimizer.state.clear()  # DeepSpeed has made a step without gradients, which Adam would count as its first
    if half and training.zero_stage == 1:
        name_stage(engine.optimizer)
    return engine


def compile_nothing() -> None:
    """Leave out an operator for inference on several CPUs: it is compiled at the first start, and unused here."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _is_plain(training: TrainingConfig, half: bool) -> bool:
    """Whether DeepSpeed steps torch's optimizer itself, with nothing of its own around it."""
    return training.zero_stage == 0 and not half


def deepspeed_config(training: TrainingConfig, half: bool) -> dict[str, Any]:
    """DeepSpeed's own settings. ``half``: the weights are in bfloat16."""
    place = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    offload = {"optimizer": {"offload_optimizer": place}, "all": {"offload_optimizer": place, "offload_param": place}}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0 if _is_plain(training, half) else training.max_grad_norm,
        "zero_optimization": {
            "stage": training.zero_stage,
            "overlap_comm": False,
            **offload.get(training.offload, {}),
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": half},
        "steps_per_print": 10**12,
    }
    if half and training.zero_stage > 0:  # stage 0 has no other way than to add gradients up in bfloat16
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def clip_and_keep_norm(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], most: float) -> None:
    """Clip before each step to the norm ``most`` (0: never) and leave the norm where DeepSpeed reads it.

    Under stage 0 in float32 DeepSpeed clips too, but tells nobody how large the gradient was.
    """

    def before_step(stepping: Any, *_: Any) -> None:
        norm = torch.nn.utils.clip_grad_norm_(parameters, most or math.inf)
        stepping._global_grad_norm = float(norm)

    optimizer.register_step_pre_hook(before_step)


def name_stage(optimizer: Any) -> None:
    """Let shards say that they are of stage 1, or DeepSpeed's own converter refuses them.

    Its optimizer for bfloat16 weights and float32 sums forgets to.
    """
    shard = optimizer.state_dict
    optimizer.state_dict = lambda: {"zero_stage": 1} | shard()


@contextmanager
def quiet_deepspeed() -> Iterator[None]:
    """Keep what DeepSpeed prints, and its notes on torch's future, off the terminal; its errors still come through."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    with redirect_stdout(io.StringIO()):
        yield


@contextmanager
def late_failures(writer: Any) -> Iterator[None]:
    """Raise a failed write of DeepSpeed's only at the end: a rank that left in between would miss its barriers."""
    failures: list[Exception] = []

    def remembering(method: Callable[..., Any]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            try:
                method(*args, **kwargs)
            except WRITE_FAILURES as error:
                failures.append(error)

        return call

    names = ("makedirs", "save")
    for name in names:
        setattr(writer, name, remembering(getattr(writer, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(writer, name)
    if failures:
        raise failures[0]

"""Supervised learning on rows of token ids by TRL's SFTTrainer, under the trainer's DeepSpeed settings.

Each optimizer step is the mean cross-entropy over its labelled tokens, whatever the micro-batches and ranks. The last
step of an epoch is filled up with rows that weigh nothing, so that no row is used twice.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils import logging as transformers_logging
from trl import SFTConfig as TrlConfig
from trl import SFTTrainer

from pipeline.config import SftConfig, TrainingConfig, check_sft
from pipeline.hub import local_model
from pipeline.training import checkpoint, distributed
from pipeline.training.deepspeed_engine import compile_nothing, deepspeed_config, quiet_deepspeed
from pipeline.training.export import write_model
from pipeline.training.trainer import load_model

IGNORED = -100
METRICS = {  # TRL's name: ours
    "loss": "sft/loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "entropy": "entropy",
    "mean_token_accuracy": "sft/token_accuracy",
    "epoch": "sft/epoch",
}

OnStep = Callable[[int, int, Mapping[str, float]], None]  # step, steps in all, metrics: on rank 0 after every step


class Supervised:
    """One model under supervised learning; collective: every rank makes the same calls.

    Checkpoints lie under ``root``; one that was not written to its end is passed over and deleted.
    Raises UserError for settings or models that it cannot train.
    """

    def __init__(
        self,
        model_path: str | Path,
        rows: Path,
        root: Path,
        training: TrainingConfig,
        sft: SftConfig,
        seed: int,
        on_step: OnStep = lambda step, steps, metrics: None,
    ) -> None:
        """``rows``: an Arrow stream of ``input_ids`` and ``labels``."""
        os.environ.setdefault("OMP_NUM_THREADS", str(training.threads))  # else accelerate takes every core
        self.device = distributed.initialise()
        if self.device.type == "cpu":
            torch.set_num_threads(training.threads)
        distributed.seed_everything(seed)
        compile_nothing()
        self.root, self.training = root, training
        self.source = local_model(model_path)
        arguments = _arguments(root, training, sft, seed, self.device)  # before the model: ZeRO-3 loads it in shards
        tokenizer = AutoTokenizer.from_pretrained(self.source, local_files_only=True)
        with _quiet():
            model = load_model(self.source, torch.bfloat16 if arguments.bf16 else torch.float32)
            self.trainer = SFTTrainer(
                model=model,
                args=arguments,
                train_dataset=_filled_up(rows, sft.batch_rows, tokenizer),
                processing_class=tokenizer,
                callbacks=[_Sealing(root), _Telling(on_step)],
            )
        self.trainer.remove_callback(PrinterCallback)

    def train(self) -> None:
        """All epochs, from the newest whole checkpoint on. Raises FloatingPointError when the loss is not finite."""
        newest = distributed.from_rank_zero(_newest(self.root) if _is_first() else None)
        with _quiet():
            self.trainer.train(resume_from_checkpoint=str(newest) if newest else None)

    def weights(self) -> dict[str, Tensor]:
        """Copies of all parameters on the CPU, by the model's own names; collective under ZeRO-3."""
        import deepspeed

        whole = {}
        for name, parameter in self.trainer.model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.training.zero_stage == 3):
                whole[name] = parameter.detach().to("cpu", copy=True).contiguous()
        return whole

    def export(self, target: Path) -> None:
        """A Hugging Face directory that transformers, vLLM and `yoke train` load, whole or absent."""
        weights, error = self.weights(), None
        if _is_first():
            try:
                model, source = self.trainer.model, self.source
                checkpoint.write_atomically(target, lambda place: write_model(model, weights, {}, source, place))
            except checkpoint.CheckpointError as failure:
                error = str(failure)
        if text := distributed.first_error(error):
            raise checkpoint.CheckpointError(text)


def _arguments(root: Path, training: TrainingConfig, sft: SftConfig, seed: int, device: torch.device) -> TrlConfig:
    ranks = torch.distributed.get_world_size()
    check_sft(sft, ranks)
    half = device.type == "cuda"
    accumulation = sft.batch_rows // (sft.micro_rows * ranks)
    deepspeed = deepspeed_config(training, half) | {
        "train_micro_batch_size_per_gpu": sft.micro_rows,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": training.max_grad_norm,
    }
    del deepspeed["managed_gradient_accumulation"]  # TRL's trainer leaves the accumulation to DeepSpeed
    return TrlConfig(
        output_dir=str(root),
        deepspeed=deepspeed,
        use_cpu=not half,
        bf16=half,
        per_device_train_batch_size=sft.micro_rows,
        gradient_accumulation_steps=accumulation,
        gradient_checkpointing=training.gradient_checkpointing,
        num_train_epochs=sft.epochs,
        learning_rate=sft.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=sft.warmup_ratio,
        optim="adamw_torch",
        adam_beta1=training.betas[0],
        adam_beta2=training.betas[1],
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        max_length=None,  # rows are measured where they are made: nothing is cut here
        dataset_kwargs={"skip_prepare_dataset": True},
        save_steps=sft.checkpoint_every,
        save_total_limit=max(2, training.keep_checkpoints),  # a new one counts only when it is sealed
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        seed=seed,
        data_seed=seed,
    )


def _filled_up(rows: Path, multiple: int, tokenizer: Any) -> Any:
    """The rows as a data set, with rows that weigh nothing up to a multiple of the step's."""
    datasets.disable_progress_bars()
    found = datasets.Dataset.from_file(str(rows))
    filler = {"input_ids": [tokenizer.eos_token_id] * 2, "labels": [IGNORED] * 2}
    missing = -len(found) % multiple
    if not missing:
        return found
    return datasets.concatenate_datasets([found, datasets.Dataset.from_list([filler] * missing, found.features)])


def _newest(root: Path) -> Path | None:
    """The newest whole checkpoint under ``root``; deletes what a killed attempt left half-written."""
    found = sorted(root.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    whole = [path for path in found if checkpoint.is_complete(path)]
    for path in set(found) - set(whole):
        shutil.rmtree(path)
    return whole[-1] if whole else None


def _is_first() -> bool:
    return torch.distributed.get_rank() == 0


class _Sealing(TrainerCallback):
    """Ends each checkpoint with a manifest: without one it is no checkpoint."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        distributed.from_all_ranks(None)  # every rank has written its part
        if _is_first():
            checkpoint.seal(self._root / f"checkpoint-{state.global_step}")


class _Telling(TrainerCallback):
    """Hands the metrics of every step on, under our names."""

    def __init__(self, on_step: OnStep) -> None:
        self._on_step = on_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float], **_: Any) -> None:
        if "loss" not in logs:  # the closing summary
            return
        if not math.isfinite(logs["loss"]):
            raise FloatingPointError(f"the loss of step {state.global_step} is {logs['loss']}; nothing was saved of it")
        if _is_first():
            known = {
                METRICS[name]: float(value) for name, value in logs.items() if name in METRICS and value is not None
            }
            self._on_step(state.global_step, state.max_steps, known)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the notes of accelerate, transformers and DeepSpeed to themselves off the terminal."""
    logging.getLogger("accelerate.accelerator").setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch|deepspeed|accelerate")
    with quiet_deepspeed():
        yield

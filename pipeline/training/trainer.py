"""The trainer of one policy: GRPO updates over closed groups through DeepSpeed, checkpoints, weights for the engine.

From GRPO it takes the group baseline (in the advantages that come in) and PPO's clip, or another loss of ``loss.py``;
it leaves out the KL term and the reference model. One pass over the groups of an update; each minibatch of whole groups
is one optimizer step. Losses that need the policy before an update or a step get one more forward, without gradients.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from pipeline.config import AlgorithmConfig, TrainingConfig, UserError, check_algorithm, check_training
from pipeline.hub import local_model
from pipeline.records import PolicyVersion, TrainGroup
from pipeline.training import checkpoint, distributed, lora
from pipeline.training.batch import (
    Minibatch,
    RowBatch,
    check_group,
    collate,
    has_contrast,
    make_minibatch,
    plan,
    split_minibatches,
)
from pipeline.training.deepspeed_engine import late_failures, make_engine
from pipeline.training.export import write_model
from pipeline.training.forward import PolicyModel
from pipeline.training.loss import LOSSES, NEEDS_ROLLOUT_RATIO, NO_VALUE, LossOutputs
from pipeline.training.loss_inputs import RolloutTotals, Snapshot, loss_inputs, off_policy_rollouts

ENGINE_TAG = "engine"
FIRST_MINIBATCH_ONLY = ("mismatch_kl", "logprob_diff_max")  # later ones compare with weights already moved


@dataclass(frozen=True)
class Step:
    """What one optimizer step tells, over all ranks: sums over tokens, maxima, and figures of its own."""

    sums: dict[str, float]
    maxima: dict[str, float]
    figures: dict[str, float]


class Trainer:
    """One policy under training; collective: every rank of the trainer's process group makes the same calls.

    ``updates`` counts the updates done, skipped ones too. Set ``policy_version`` to the current weights' version to
    restrict ``logprob_diff_max`` to rollouts that these weights sampled. ``temperature`` is the one of the engine.
    Raises UserError for settings or models it cannot train.
    """

    def __init__(
        self,
        model_path: str | Path,
        training: TrainingConfig,
        algorithm: AlgorithmConfig,
        seed: int,
        total_updates: int,
        temperature: float = 1.0,
    ) -> None:
        check_algorithm(algorithm)
        check_training(training)
        self.device = distributed.initialise()
        if self.device.type == "cpu":
            torch.set_num_threads(training.threads)
        distributed.seed_everything(seed)
        self.training, self.algorithm, self.total_updates = training, algorithm, total_updates
        self.updates = 0
        self.policy_version: PolicyVersion | None = None
        self.source = local_model(model_path)
        model = load_model(self.source, torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        if training.lora.rank is not None:
            lora.attach(model, training.lora)
        self.policy = PolicyModel(model, temperature, training.gradient_checkpointing)
        self.engine = make_engine(self.policy, training)

    @property
    def rank(self) -> int:
        """This process among the trainer's."""
        return dist.get_rank()

    @property
    def ranks(self) -> int:
        """How many processes train together."""
        return dist.get_world_size()

    def update(self, groups: Sequence[TrainGroup] | None) -> dict[str, float]:
        """One pass over ``groups`` (rank 0's are used on every rank); returns metrics, the same on every rank.

        Groups without contrast are left out; with none left no step is made and ``skipped`` is 1.
        ``logprob_diff_max`` is absent when no token of the first minibatch can be compared.
        Raises ValueError for a malformed group, FloatingPointError before a loss that is not finite moves the weights.
        """
        started = time.perf_counter()
        received: list[TrainGroup] = distributed.from_rank_zero(list(groups or ()))
        for group in received:
            check_group(group)
        contrasting = [group for group in received if has_contrast(group)]
        minibatches = [
            make_minibatch(part, self.algorithm, self.policy_version)
            for part in split_minibatches(contrasting, self.algorithm.minibatches)
        ]
        minibatches = [minibatch for minibatch in minibatches if minibatch.rows]
        rate = learning_rate(self.training, self.updates, self.total_updates)
        self._set_learning_rate(rate)
        work = [(minibatch, self._plan(minibatch)) for minibatch in minibatches]
        before = [self._snapshot(*part) if self.algorithm.decoupled else None for part in work]
        steps = [self._step(*part, prox) for part, prox in zip(work, before, strict=True)]
        self.updates += 1
        metrics = summarise(steps) | batch_metrics(received, minibatches, self.policy.packs)
        if self.algorithm.decoupled:
            metrics["batch/off_policy_rollouts"] = self._off_policy_rollouts(minibatches, before)
        return metrics | {"learning_rate": rate, "perf/update_s": time.perf_counter() - started}

    def _set_learning_rate(self, rate: float) -> None:
        for parameters in self.engine.optimizer.param_groups:
            parameters["lr"] = rate

    def _plan(self, minibatch: Minibatch) -> list[RowBatch]:
        """This rank's forwards for one step."""
        return plan(minibatch.rows, self.training.token_budget, self.policy.packs, self.ranks)[self.rank]

    def _snapshot(self, minibatch: Minibatch, batches: Sequence[RowBatch], prox: Snapshot | None = None) -> Snapshot:
        """One forward without gradients: the current logprobs, and the rollouts' ratios to μ, or else to ``prox``."""
        logprobs, totals = [], RolloutTotals.zeros(minibatch.rollouts)
        for number, batch in enumerate(batches):
            micro = collate(batch).to(self.device)
            with torch.no_grad():
                logprobs.append(self.engine(micro)[0].detach())
            reference = prox.logprobs[number] if prox else micro.behaviour
            if not batch.filler:
                totals += RolloutTotals.of(logprobs[-1] - reference, micro.rollouts, minibatch.rollouts)
        return Snapshot(tuple(logprobs), RolloutTotals(distributed.add_up(totals.values)))

    def _off_policy_rollouts(self, minibatches: Sequence[Minibatch], before: Sequence[Snapshot | None]) -> float:
        """How many rollouts the off-policy mask takes out of this update."""
        bound = self.algorithm.off_policy_bound
        pairs = zip(minibatches, before, strict=True)
        return float(sum(off_policy_rollouts(part.rows, shot.totals, bound) for part, shot in pairs if shot))

    def _step(self, minibatch: Minibatch, batches: Sequence[RowBatch], prox: Snapshot | None) -> Step:
        """One optimizer step; sums, maxima and the gradient's norm over all ranks."""
        started = time.perf_counter()
        by_rollout = LOSSES[self.algorithm.loss] in NEEDS_ROLLOUT_RATIO
        now = self._snapshot(minibatch, batches, prox) if by_rollout else None
        sums: dict[str, float] = {}
        maxima: dict[str, float] = {}
        for number, batch in enumerate(batches):
            outputs = self._backward(batch, number, prox, now)
            real = not batch.filler
            sums = {name: sums.get(name, 0.0) + real * value for name, value in outputs.sums.items()}
            maxima = {
                name: max(maxima.get(name, NO_VALUE), value if real else NO_VALUE)
                for name, value in outputs.maxima.items()
            }
        sums = distributed.reduce(sums, dist.ReduceOp.SUM)
        maxima = distributed.reduce(maxima, dist.ReduceOp.MAX)
        computed = time.perf_counter()
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm() or 0.0)
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient's norm is {norm}; the weights are spoilt, go on from the last checkpoint"
            )
        times = {"perf/fwd_bwd_s": computed - started, "perf/optimizer_s": time.perf_counter() - computed}
        forwards = {"batch/forwards_per_step": float(len(batches))}
        return Step(sums, maxima, times | forwards | {"grad_norm": norm})

    def _backward(self, batch: RowBatch, number: int, prox: Snapshot | None, now: Snapshot | None) -> LossOutputs:
        micro = collate(batch).to(self.device)
        logprobs, entropy = self.engine(micro)
        inputs = loss_inputs(micro, logprobs, entropy, self.algorithm, number, prox, now)
        outputs = LOSSES[self.algorithm.loss](inputs, self.algorithm.clip_low, self.algorithm.clip_high)
        loss = float(outputs.loss.detach())
        failure = None if torch.isfinite(outputs.loss) else f"the loss is {loss} over rollouts {rollout_ids(batch)}"
        if failure := distributed.first_error(failure):
            raise FloatingPointError(f"{failure}; no step was made, the weights are as before")
        self.engine.backward(outputs.loss * self.ranks)  # DeepSpeed averages over ranks, the loss adds up over them
        return replace(outputs, sums=outputs.sums | {"loss": loss})

    def save(self, root: Path, state: dict[str, Any], fence: Callable[[], None] = lambda: None) -> None:
        """Add a checkpoint with the JSON-able ``state`` under ``root`` and drop the oldest beyond ``keep_checkpoints``.

        ``state["attempt"]`` of rank 0, 0 if absent, comes first in the order of checkpoints. ``fence`` is called on
        rank 0 just before the checkpoint is published, and before anything is dropped, and may raise. Raises
        CheckpointError, on every rank, when the checkpoint cannot be written; the older ones are then untouched.
        """
        attempt = int(state.get("attempt", 0))
        partial, target, cause = self._begin(root, attempt)
        cause = cause or distributed.first_error(self._write(partial, state))
        if cause is None:
            cause = distributed.first_error(_publish(partial, target, fence) if self.rank == 0 else None)
        if cause is not None:
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise checkpoint.write_error(target, cause)
        if self.rank == 0:
            fence()
            checkpoint.prune(root, self.training.keep_checkpoints, attempt)

    def _begin(self, root: Path, attempt: int) -> tuple[Path, Path, str | None]:
        """Where to write, where to publish, and what went wrong: rank 0's, on every rank."""
        target, cause = root / "checkpoint", None
        if self.rank == 0:
            try:
                root.mkdir(parents=True, exist_ok=True)
                target = root / checkpoint.next_name(root, self.updates, attempt)
            except OSError as error:
                cause = _text(error)
        return distributed.from_rank_zero((checkpoint.partial_path(target), target, cause))

    def _write(self, partial: Path, state: dict[str, Any]) -> str | None:
        """This rank's files; returns what went wrong, so that no rank is left waiting for another."""
        own = {"updates": self.updates, "state": state, **self._layout()}
        failure: str | None = None
        try:
            partial.mkdir(exist_ok=True)
            if self.rank == 0:
                (partial / checkpoint.STATE_FILE).write_text(json.dumps(own))
            torch.save(distributed.random_state(), partial / f"random-{self.rank}.pt")
        except checkpoint.WRITE_FAILURES as error:
            failure = _text(error)
        if failure := distributed.first_error(failure):  # nobody may go into DeepSpeed's barriers alone
            return failure
        try:
            with late_failures(self.engine.checkpoint_engine):
                self.engine.save_checkpoint(
                    str(partial), tag=ENGINE_TAG, save_latest=False, exclude_frozen_parameters=self._adapters_only
                )
            checkpoint.sync_tree(partial)
        except checkpoint.WRITE_FAILURES as error:
            return _text(error)
        return None

    def load(self, root: Path) -> dict[str, Any]:
        """Restore the newest complete checkpoint under ``root`` and return its ``state``; ``{}`` if there is none.

        Raises CheckpointError when it was written by another number of ranks, ZeRO stage or offload.
        """
        path = distributed.from_rank_zero(checkpoint.newest(root))
        if path is None:
            return {}
        own = checkpoint.read_json(path / checkpoint.STATE_FILE)
        for name, here in self._layout().items():
            if own.get(name, here) != here:
                raise checkpoint.CheckpointError(
                    f"{path} was written with {name}={own[name]}, this run has {name}={here}"
                )
        loaded, _ = self.engine.load_checkpoint(str(path), tag=ENGINE_TAG, load_module_strict=not self._adapters_only)
        if loaded is None:
            raise checkpoint.CheckpointError(f"DeepSpeed found nothing to load in {path}")
        self.updates = own["updates"]
        distributed.restore_random_state(torch.load(path / f"random-{self.rank}.pt", weights_only=False))
        state: dict[str, Any] = own["state"]
        return state

    @property
    def _adapters_only(self) -> bool:
        """Whether the model itself is frozen."""
        return self.training.lora.rank is not None

    def _layout(self) -> dict[str, Any]:
        """What the shards of a checkpoint depend on."""
        training = self.training
        own = {"zero_stage": training.zero_stage, "offload": training.offload, "lora": asdict(training.lora)}
        return {"ranks": self.ranks, **own}

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of each weight that an engine with the base model lacks, as that model's checkpoint names it.

        All of them, or with LoRA those of the blocks that hold adapters, merged; a tied head is the embedding only.
        Under ZeRO-3 each tensor is gathered while it is yielded, so every rank must exhaust the iterator.
        """
        yield from self._values(lora.changed_weights(self.policy.model))

    def _values(self, weights: Sequence[lora.Weight]) -> Iterator[tuple[str, Tensor]]:
        for weight in weights:
            with self._gathered(weight.parameters):
                yield weight.name, weight.value()

    def _gathered(self, parameters: Sequence[nn.Parameter]) -> Any:
        if self.training.zero_stage < 3:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(parameters))

    def export(self, target: Path) -> None:
        """Write a Hugging Face directory that transformers and vLLM load, whole or not at all (CheckpointError).

        With LoRA it holds the merged model, and the adapter by itself in the folder ``adapter``.
        """
        model = self.policy.model
        whole, adapter = (
            {
                name: value.detach().to("cpu", copy=self.training.zero_stage == 3).contiguous()
                for name, value in self._values(part)
            }
            for part in (lora.weights(model), lora.adapter_weights(model))
        )
        error = None
        if self.rank == 0:
            try:
                checkpoint.write_atomically(
                    target, lambda partial: write_model(model, whole, adapter, self.source, partial)
                )
            except checkpoint.CheckpointError as failure:
                error = str(failure)
        if failure_text := distributed.first_error(error):
            raise checkpoint.CheckpointError(failure_text)


def learning_rate(training: TrainingConfig, update: int, total: int) -> float:
    """The rate of update ``update`` (from 0): constant, then linear to ``min_lr_ratio`` at the last of ``total``."""
    start = total * (1 - training.decay_fraction)
    span = total - 1 - start
    progress = min(1.0, max(0.0, (update - start) / span)) if span > 0 else 0.0
    return training.learning_rate * (1 - progress * (1 - training.min_lr_ratio))


def load_model(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model in ``path``. Raises UserError when transformers cannot read it."""
    transformers_logging.disable_progress_bar()
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model.path={path} cannot be loaded as a causal language model: {error}") from error
    return model


def summarise(steps: Sequence[Step]) -> dict[str, float]:
    """Metrics of an update from those of its steps: means over tokens, maxima, and what only the first can tell."""
    if not steps:
        return {"skipped": 1.0}
    tokens = sum(step.sums["tokens"] for step in steps)
    means = [name for name in steps[0].sums if name not in ("tokens", "loss", *FIRST_MINIBATCH_ONLY)]
    metrics = {name: sum(step.sums[name] for step in steps) / tokens for name in means}
    metrics["loss"] = sum(step.sums["loss"] for step in steps) / len(steps)
    maxima = [name for name in steps[0].maxima if name not in FIRST_MINIBATCH_ONLY]
    metrics |= {name: max(step.maxima[name] for step in steps) for name in maxima}
    for name in steps[0].figures:
        total = sum(step.figures[name] for step in steps)
        metrics[name] = total if name.startswith("perf/") else total / len(steps)
    metrics["mismatch_kl"] = steps[0].sums["mismatch_kl"] / steps[0].sums["tokens"]
    if steps[0].maxima["logprob_diff_max"] != NO_VALUE:
        metrics["logprob_diff_max"] = steps[0].maxima["logprob_diff_max"]
    counts = {"skipped": 0.0, "steps": float(len(steps)), "batch/trained_tokens_per_step": tokens / len(steps)}
    return metrics | counts


def batch_metrics(received: Sequence[TrainGroup], minibatches: Sequence[Minibatch], packed: bool) -> dict[str, float]:
    """What came in, what of it was trained, and how many rows had to be padded instead of packed."""
    groups = sum(minibatch.groups for minibatch in minibatches)
    rows = sum(len(minibatch.rows) for minibatch in minibatches)
    return {
        "batch/groups": float(groups),
        "batch/groups_without_contrast": float(sum(not has_contrast(group) for group in received)),
        "batch/rollouts": float(sum(minibatch.rollouts for minibatch in minibatches)),
        "batch/rows": float(rows),
        "batch/padded_rows": 0.0 if packed else float(rows),
    }


def rollout_ids(batch: RowBatch) -> str:
    """The rollouts of a forward, for an error message."""
    return ", ".join(sorted({row.rollout_id for row in batch.rows}))


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _publish(partial: Path, target: Path, fence: Callable[[], None]) -> str | None:
    try:
        checkpoint.publish(partial, target, fence)
    except OSError as error:
        return _text(error)
    return None

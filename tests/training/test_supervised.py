"""Supervised learning by TRL's trainer: its loss and its steps against plain ones, resume, and what RL loads."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from training_helpers import VOCABULARY, random_groups, save_model
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from pipeline.config import AlgorithmConfig, SftConfig, TrainingConfig, UserError, check_sft
from pipeline.training.supervised import Supervised
from pipeline.training.trainer import Trainer

ROWS = 10
TRAINING = TrainingConfig(max_grad_norm=1.0, weight_decay=0.01, betas=[0.9, 0.95])
SFT = SftConfig(epochs=3.0, learning_rate=1e-3, warmup_ratio=0.0, batch_rows=4, micro_rows=2, checkpoint_every=1)
Weights = dict[str, torch.Tensor]
STEPS = 9  # three an epoch: two fillers make ten rows twelve


class Killed(BaseException):
    pass


def written_rows(path: Path, count: int = ROWS) -> list[dict[str, list[int]]]:
    """Random rows of different lengths, about half of each row's tokens labelled; the first token never is."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        ids = rng.integers(3, VOCABULARY, rng.integers(4, 24))
        labels = np.where(rng.random(len(ids)) < 0.5, ids, -100)
        labels[0], labels[-1] = -100, ids[-1]
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    ids_type = pa.list_(pa.int32())
    schema = pa.schema([("input_ids", ids_type), ("labels", ids_type)])
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema))
    return rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """The weights after a whole training by one process, at ZeRO stage 1."""
    trainer = supervised(model, tmp_path_factory.mktemp("alone"))
    trainer.train()
    return trainer.weights()


@pytest.fixture(autouse=True)
def no_stage_3_is_left() -> Iterator[None]:
    """ZeRO-3 is global to a process: transformers would load every later model in shards."""
    yield
    unset_hf_deepspeed_config()


def supervised(model: Path, place: Path, sft: SftConfig = SFT, training: TrainingConfig = TRAINING, **more: Any) -> Any:
    place.mkdir(exist_ok=True)
    written_rows(place / "rows.arrow")
    return Supervised(model, place / "rows.arrow", place, training, sft, 0, **more)


def distance(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """The largest norm-relative difference of a parameter."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).detach().norm() / theirs[name].detach().norm()) for name in ours)


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> tuple[float, int]:
    """Sum over the labelled tokens of one row, and how many they are; each is predicted by the position before it."""
    shifted = logits[:-1].astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    wanted = np.flatnonzero(labels[1:] != -100)
    return float(-logprobs[wanted, labels[1:][wanted]].sum()), len(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "lfm2"])
def test_loss_and_steps_are_plain_ones(kind: str, tmp_path: Path) -> None:
    """All rows in each step, so their order does not count: its loss by NumPy, its weights by a plain torch loop."""
    model, losses = save_model(tmp_path / "model", kind), []
    sft = replace(SFT, batch_rows=ROWS, epochs=2.0)
    trainer = supervised(model, tmp_path, sft, on_step=lambda step, steps, metrics: losses.append(metrics["sft/loss"]))
    before = copy.deepcopy(trainer.weights())
    rows = written_rows(tmp_path / "rows.arrow")
    trainer.train()

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert distance(before, dict(plain.named_parameters())) == 0
    norms = [value for name, value in plain.named_parameters() if "norm" in name]  # TRL lets these and biases not decay
    others = [value for name, value in plain.named_parameters() if "norm" not in name]
    groups = [{"params": others, "weight_decay": 0.01}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    tokens = sum(label != -100 for row in rows for label in row["labels"])
    for step in range(2):
        sums = []
        optimizer.zero_grad()
        for row in rows:
            ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
            logits = plain(ids).logits
            sums.append(cross_entropy(logits[0].detach().numpy(), labels[0].numpy()))
            loss = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")
            (loss / tokens).backward()
        assert sum(count for _, count in sums) == tokens
        assert losses[step] == pytest.approx(sum(value for value, _ in sums) / tokens, rel=1e-5)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = SFT.learning_rate * (1 - step / 2)
        optimizer.step()
    assert distance(trainer.weights(), {n: v.detach() for n, v in plain.named_parameters()}) < 1e-5
    assert distance(trainer.weights(), before) > 1e-3


@pytest.mark.slow
def test_a_killed_training_goes_on_to_the_same_weights(model: Path, alone: Weights, tmp_path: Path) -> None:
    def kill(step: int, steps: int, metrics: Mapping[str, float]) -> None:
        assert steps == STEPS
        if step == 5:
            raise Killed

    steps: list[int] = []
    with pytest.raises(Killed):
        supervised(model, tmp_path / "killed", on_step=kill).train()
    half_written = tmp_path / "killed" / "checkpoint-5"  # killed between writing and sealing
    shutil.copytree(tmp_path / "killed" / "checkpoint-4", half_written)
    (half_written / "trainer_state.json").write_text("{")
    again = supervised(model, tmp_path / "killed", on_step=lambda step, *_: steps.append(step))
    again.train()
    assert steps == [5, 6, 7, 8, 9]
    assert distance(again.weights(), alone) == 0
    assert len(list((tmp_path / "killed").glob("checkpoint-*"))) == 2

    supervised(model, tmp_path / "killed", on_step=lambda step, *_: steps.append(step)).train()  # nothing is left to do
    assert steps == [5, 6, 7, 8, 9]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "offload"), [(0, "none"), (2, "optimizer"), (3, "none")])
def test_zero_stages_change_nothing_and_rl_starts_from_the_export(
    stage: int, offload: str, model: Path, alone: Weights, tmp_path: Path
) -> None:
    other = supervised(model, tmp_path, training=replace(TRAINING, zero_stage=stage, offload=offload))
    other.train()
    weights = other.weights()
    assert distance(weights, alone) < 1e-5
    other.export(tmp_path / "export")
    unset_hf_deepspeed_config()
    written = load_file(tmp_path / "export" / "model.safetensors")
    assert distance({name: written[name] for name in weights}, weights) == 0
    trainer = Trainer(tmp_path / "export", TrainingConfig(), AlgorithmConfig(minibatches=1), 0, 1)
    assert distance(dict(trainer.named_weights()), weights) == 0
    assert math.isfinite(trainer.update(random_groups(0))["loss"])
    assert (tmp_path / "export" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"batch_rows": 6, "micro_rows": 2}, "must be a multiple of sft.micro_rows=2 × 2 ranks"),
        ({"rows": "call"}, "sft.rows=call is not known; choose one of conversation, turn"),
        ({"epochs": 0.0}, "must be above 0"),
        ({"max_length": 0}, "sft.max_length=0"),
        ({"checkpoint_every": 0}, "sft.checkpoint_every=0"),
    ],
)
def test_numbers_that_cannot_work_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        check_sft(replace(SftConfig(), **changes), ranks=2)

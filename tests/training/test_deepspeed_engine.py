"""bfloat16 weights with float32 master copies, as on a GPU, under each optimizer that DeepSpeed has for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_helpers import random_groups, save_model, weights
from transformers import PreTrainedModel

from pipeline.config import AlgorithmConfig, TrainingConfig
from pipeline.training import trainer as module
from pipeline.training.checkpoint import newest
from pipeline.training.export import export_checkpoint
from pipeline.training.trainer import Trainer, load_model

LAYOUTS = [(0, "none"), (1, "none"), (1, "optimizer"), (3, "all")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "qwen3")


def make(model: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, layout: tuple[int, str]) -> Trainer:
    def in_dtype(path: Path, _: torch.dtype) -> PreTrainedModel:
        return load_model(path, dtype)

    monkeypatch.setattr(module, "load_model", in_dtype)
    stage, offload = layout
    # The weights are around 0.3, where bfloat16 has steps of 0.002: a weight moves after some steps of the master copy.
    training = TrainingConfig(zero_stage=stage, offload=offload, token_budget=60, learning_rate=3e-4)
    return Trainer(model, training, AlgorithmConfig(minibatches=1), 0, 20)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision_trains_resumes_and_exports(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: tuple[int, str]
) -> None:
    whole = make(model, torch.float32, monkeypatch, (1, "none"))
    half = make(model, torch.bfloat16, monkeypatch, layout)
    assert half.engine.get_data_types()[1] == (torch.float32 if layout[0] else torch.bfloat16), "sums of gradients"
    start = weights(whole)
    for seed in range(4):
        metrics = [trainer.update(random_groups(seed)) for trainer in (whole, half)]
        assert metrics[1]["grad_norm"] == pytest.approx(metrics[0]["grad_norm"], rel=0.1)
        counted = {float(state["step"]) for state in half.engine.basic_optimizer.state.values()}
        assert counted == {seed + 1}, "Adam's first steps depend on it"
        if seed == 1:
            half.save(tmp_path / "checkpoints", {})
    moved, wanted = (
        torch.cat([(value.float() - start[name]).flatten() for name, value in weights(trainer).items()])
        for trainer in (half, whole)
    )
    assert torch.nn.functional.cosine_similarity(moved, wanted, 0) > 0.3, "0.63 here: steps of bfloat16 are coarse"
    again = make(model, torch.bfloat16, monkeypatch, layout)
    again.load(tmp_path / "checkpoints")
    for seed in (2, 3):
        again.update(random_groups(seed))
    trained = weights(half)
    assert all(torch.equal(value, trained[name]) for name, value in weights(again).items())
    again.save(tmp_path / "checkpoints", {})
    last = newest(tmp_path / "checkpoints")
    assert last is not None
    export_checkpoint(str(model), last, tmp_path / "export", "bfloat16")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == trained.keys()
    assert all(torch.equal(value, trained[name]) for name, value in exported.items())

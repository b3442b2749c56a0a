"""Two and four trainer processes over gloo do what one does, whatever they share out among them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from forked import run_ranks
from rank_programs import (
    Layout,
    first_gradients,
    layout_trainer,
    save_on_a_full_disk,
    train_layouts,
    update,
)
from safetensors.torch import load_file
from training_helpers import save_model, weights

from pipeline.config import OFFLOADS
from pipeline.training.checkpoint import CheckpointError, newest
from pipeline.training.export import export_checkpoint
from pipeline.training.trainer import Trainer

ALGORITHMS = {
    "ppo_clip": {},
    "gspo": {"loss": "gspo", "aggregation": "rollout_mean", "clip_high": 5.0},
    "cispo, decoupled": {"loss": "cispo", "aggregation": "token_mean", "decoupled": True, "correction_low": 0.1},
    "off-policy mask": {
        "aggregation": "constant",
        "constant_tokens": 16,
        "decoupled": True,
        "correction": "tis",
        "off_policy_bound": 1.0,
    },
}
EVERY_LAYOUT = [Layout(stage, offload) for offload, stages in OFFLOADS.items() for stage in stages]
COMPARED = ("loss", "entropy", "grad_norm", "mismatch_kl", "ratio/mean", "logprob_diff_max", "batch/rows")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("ranks") / "model")


@pytest.mark.parametrize(
    ("ranks", "layouts", "resume"),
    [(2, EVERY_LAYOUT, True), (4, [Layout(2, "optimizer"), Layout(3, "all")], False)],
    ids=["two ranks", "four ranks"],
)
def test_every_layout_on_many_ranks_trains_as_one_rank_does(
    model: Path, tmp_path: Path, ranks: int, layouts: list[Layout], resume: bool
) -> None:
    """Weights, metrics, a restart, and exports: by all ranks together and by one process from their checkpoint."""
    metrics, expected = plain_updates(layout_trainer(model, Layout(0), token_budget=10**6))
    run_ranks(tmp_path, ranks, train_layouts, model, tmp_path, layouts, resume)
    for layout in layouts:
        place = tmp_path / str(layout)
        theirs, trained = torch.load(place / "result.pt", weights_only=False)
        assert trained.keys() == expected.keys()
        for name, value in expected.items():
            assert (trained[name] - value).norm() <= 1e-5 * value.norm(), (place.name, name)
        for mine, other in zip(metrics, theirs, strict=True):
            assert {name: other[name] for name in COMPARED} == pytest.approx({n: mine[n] for n in COMPARED}, rel=1e-4)
        assert theirs[0]["batch/forwards_per_step"] > 1
        assert_exports_agree(model, place, set(expected))
    with pytest.raises(CheckpointError, match=f"written with ranks={ranks}, this run has ranks=1"):
        layout_trainer(model, layouts[0]).load(tmp_path / str(layouts[0]) / "checkpoints")


def plain_updates(trainer: Trainer) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Metrics and weights after two updates of one forward a step."""
    metrics = [update(trainer, seed) for seed in (0, 1)]
    assert metrics[0]["batch/forwards_per_step"] == 1
    return metrics, weights(trainer)


def test_adapters_on_two_ranks_train_as_on_one(model: Path, tmp_path: Path) -> None:
    """Compared by how far they moved the weights: the base is the same anyway."""
    layout = Layout(3, adapters=4)
    trainer = layout_trainer(model, Layout(1, adapters=4), token_budget=10**6)
    base = weights(trainer)
    _, expected = plain_updates(trainer)
    run_ranks(tmp_path, 2, train_layouts, model, tmp_path, [layout], True)
    _, trained = torch.load(tmp_path / str(layout) / "result.pt", weights_only=False)
    moved = {name for name, value in expected.items() if not torch.equal(value, base[name])}
    assert moved == {name for name in expected if name.endswith("proj.weight")}
    for name in moved:
        assert (trained[name] - expected[name]).norm() <= 1e-2 * (expected[name] - base[name]).norm(), name
    assert_exports_agree(model, tmp_path / str(layout), set(expected) | {"model.embed_tokens.weight"})


def assert_exports_agree(model: Path, place: Path, names: set[str]) -> None:
    """That of all ranks together, and that of one process from their checkpoint."""
    together, alone = load_file(place / "export" / "model.safetensors"), exported_by_one_process(model, place)
    assert alone.keys() == together.keys() >= names, place.name
    assert all(torch.equal(value, alone[name]) for name, value in together.items()), place.name


def exported_by_one_process(model: Path, place: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's weights, as a job that evaluates it would export them."""
    trained = newest(place / "checkpoints")
    assert trained is not None
    for _ in range(2):  # the second one finds the place taken
        export_checkpoint(str(model), trained, place / "again", "float32")
    assert not list(place.glob(".partial*"))
    return dict(load_file(place / "again" / "model.safetensors"))


def test_ranks_and_accumulation_leave_loss_and_gradient_alone(model: Path, tmp_path: Path) -> None:
    """The first moment after one step is the gradient, but for a factor. One forward on one rank, many on four."""
    results = {}
    for ranks, budget in ((1, 10**6), (2, 60), (4, 20)):
        out = tmp_path / str(ranks)
        run_ranks(out, ranks, first_gradients, model, out, budget, ALGORITHMS)
        results[ranks] = torch.load(out / "gradients.pt", weights_only=False)
    assert results[4]["gspo"][0]["batch/forwards_per_step"] > 1
    for name, (metrics, gradient) in results[1].items():
        assert gradient.norm() > 1e-4, name
        for ranks in (2, 4):
            others, other = results[ranks][name]
            assert (other - gradient).norm() <= 1e-5 * gradient.norm(), (name, ranks)
            for key in ("loss", "grad_norm", "is_masked", "batch/off_policy_rollouts", "ratio/max"):
                assert others.get(key, 0) == pytest.approx(metrics.get(key, 0), rel=1e-5, abs=1e-6), (name, ranks, key)
    assert 0 < results[1]["off-policy mask"][0]["batch/off_policy_rollouts"] < 12


def test_a_disk_that_is_full_for_one_rank_fails_the_checkpoint_on_every_rank(model: Path, tmp_path: Path) -> None:
    run_ranks(tmp_path / "ranks", 2, save_on_a_full_disk, model, tmp_path / "checkpoints")

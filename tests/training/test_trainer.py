"""The trainer's steps against plain torch, its metrics, and what it leaves alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from training_helpers import add_plain_gradients, random_groups, save_model, token_logprobs
from transformers import AutoModelForCausalLM

from pipeline.config import OFFLOADS, AlgorithmConfig, TrainingConfig, UserError
from pipeline.records import PolicyVersion, RolloutRecord, Row, TrainGroup
from pipeline.training.batch import split_minibatches
from pipeline.training.trainer import Trainer, learning_rate

RATE = 5e-4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: save_model(root / kind, kind) for kind in ("qwen3", "lfm2")}


def plain_update(
    path: Path, groups: list[TrainGroup], minibatches: int, updates: int, clip: float
) -> tuple[torch.nn.Module, list[float]]:
    """GRPO in plain torch, one unpadded forward a row, group_mean written out; also each step's gradient norm."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    norms = []
    for part in split_minibatches(groups, minibatches) * updates:
        add_plain_gradients(model, part)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


def make(path: Path, total: int = 4, algorithm: AlgorithmConfig | None = None, **training: object) -> Trainer:
    defaults: dict = {"learning_rate": RATE, "weight_decay": 0.01, "decay_fraction": 0.0}
    return Trainer(path, TrainingConfig(**(defaults | training)), algorithm or AlgorithmConfig(minibatches=2), 0, total)


LAYOUTS = [(stage, offload) for offload, stages in OFFLOADS.items() for stage in stages]


@pytest.mark.parametrize(
    ("stage", "offload", "budget", "clip"),
    [*((*layout, 20, 0.05) for layout in LAYOUTS), (0, "none", 8192, 0.0), (1, "none", 8192, 0.0)],
)
def test_updates_match_plain_torch(models: dict[str, Path], stage: int, offload: str, budget: int, clip: float) -> None:
    groups = random_groups(0)
    trainer = make(models["qwen3"], zero_stage=stage, offload=offload, token_budget=budget, max_grad_norm=clip)
    for _ in range(2):
        metrics = trainer.update(groups)
    assert metrics["grad_norm"] > 0.05, "the clip must bite for this to mean anything"
    assert metrics["batch/padded_rows"] == 0 < metrics["batch/rows"]
    assert budget > 20 or metrics["batch/forwards_per_step"] > 2
    expected, norms = plain_update(models["qwen3"], groups, 2, 2, clip)
    assert metrics["grad_norm"] == pytest.approx(sum(norms[2:]) / 2, rel=1e-4)  # Adam alone would hide a wrong scale
    assert_close(trainer, expected)


def test_hybrid_model_matches_plain_torch(models: dict[str, Path]) -> None:
    groups = random_groups(1)
    trainer = make(models["lfm2"], token_budget=60, max_grad_norm=0.0)
    metrics = trainer.update(groups)
    assert metrics["batch/padded_rows"] == metrics["batch/rows"]
    expected, norms = plain_update(models["lfm2"], groups, 2, 1, 0.0)
    assert metrics["grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-4)
    assert_close(trainer, expected)


DECOUPLED = {"decoupled": True, "correction": "tis", "correction_high": 1.2, "off_policy_bound": 0.3}


@pytest.mark.parametrize("settings", [{"loss": "gspo"}, DECOUPLED | {"loss": "gspo"}], ids=["gspo", "decoupled"])
def test_losses_that_look_back_match_plain_torch(models: dict[str, Path], settings: dict) -> None:
    """π_prox is the policy before the whole update, GSPO's ratio that before each step, over all rows of a rollout."""
    groups = random_groups(0)
    algorithm = AlgorithmConfig(aggregation="rollout_mean", minibatches=2, **settings)
    trainer = make(models["qwen3"], algorithm=algorithm, token_budget=20, max_grad_norm=0.0, learning_rate=5e-3)
    metrics = trainer.update(groups)
    expected, norms, dropped = plain_gspo(models["qwen3"], groups, algorithm, 5e-3)
    assert metrics["grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-4)
    assert metrics.get("batch/off_policy_rollouts", 0) == dropped
    assert not settings.get("decoupled") or (dropped > 0 and 0 < metrics["is_masked"] < 1)
    assert_close(trainer, expected, scale=10)


def plain_gspo(
    path: Path, groups: list[TrainGroup], algorithm: AlgorithmConfig, rate: float
) -> tuple[torch.nn.Module, list[float], int]:
    """One update written out: also the gradient's norms, and how many rollouts the off-policy mask takes."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    with torch.no_grad():
        before = {m.rollout_id: rollout_logprobs(model, m) for group in groups for m in group.rollouts}
    norms, dropped = [], 0
    for part in split_minibatches(groups, 2):
        members = [pair for group in part for pair in zip(group.rollouts, group.advantages, strict=True)]
        for member, advantage in members:
            logprobs = rollout_logprobs(model, member)
            sampled = torch.cat([torch.from_numpy(row.logprobs[row.loss_mask]) for row in member.rows])
            weight = torch.ones_like(sampled)
            if algorithm.decoupled:
                rho = before[member.rollout_id] - sampled
                off = advantage < 0 and float(-rho.mean()) > algorithm.off_policy_bound
                dropped += off
                weight = (0.0 if off else 1.0) * rho.exp().clamp(max=algorithm.correction_high)
                sampled = before[member.rollout_id]
            ratio = (logprobs - sampled).mean().exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            if algorithm.decoupled:  # each token's own weight is on its own gradient
                unclipped = bool(ratio * advantage <= ratio.clamp(0.8, 1.2) * advantage)
                surrogate = unclipped * ratio.detach() * advantage * logprobs
            (-(weight * surrogate).mean() / len(members)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    return model, norms, dropped


def rollout_logprobs(model: torch.nn.Module, member: RolloutRecord) -> torch.Tensor:
    return torch.cat([token_logprobs(model, row) for row in member.rows])


def assert_close(trainer: Trainer, expected: torch.nn.Module, scale: float = 1) -> None:
    """Equal to rounding: Adam divides by the gradient's size, so a lone weight with almost none may differ by more."""
    mine = weights(trainer)
    for name, value in expected.named_parameters():
        difference = (mine.pop(name) - value.detach()).abs()
        assert difference.max() < 5e-6 * scale, f"{name}: {difference.max()}"
        assert difference.quantile(0.99) < 1e-6 * scale, name
    assert not mine


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.named_weights()}


def test_groups_without_contrast_are_left_out(models: dict[str, Path]) -> None:
    groups = random_groups(2)
    flat = replace(random_groups(3)[0], group_id="flat", advantages=(0.0, 1e-17, 0.0, -1e-17))
    one, two = make(models["qwen3"]), make(models["qwen3"])
    metrics = one.update([*groups, flat])
    two.update(groups)
    assert metrics["batch/groups_without_contrast"] == 1 and metrics["skipped"] == 0
    assert all(torch.equal(value, weights(two)[name]) for name, value in weights(one).items())


def test_an_update_without_contrast_makes_no_step(models: dict[str, Path]) -> None:
    trainer = make(models["qwen3"])
    trainer.update(random_groups(2))
    before = weights(trainer)
    flat = replace(random_groups(3)[0], advantages=(0.0,) * 4)
    metrics = trainer.update([flat])
    assert metrics["skipped"] == 1 and all(isinstance(value, float) for value in metrics.values())
    assert trainer.updates == 2
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


def on_policy(path: Path, groups: list[TrainGroup], version: PolicyVersion) -> list[TrainGroup]:
    """The groups with the model's own logprobs, as an engine with these weights would record them."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def sampled(row: Row) -> Row:
        logprobs = np.zeros(len(row.input_ids), np.float32)
        logprobs[row.loss_mask] = token_logprobs(model, row).detach().numpy()
        return replace(row, logprobs=logprobs)

    def member(rollout):
        rows = tuple(sampled(row) for row in rollout.rows)
        return replace(rollout, rows=rows, version=version, newest_version=version)

    return [replace(group, rollouts=tuple(member(rollout) for rollout in group.rollouts)) for group in groups]


def test_metrics_on_policy(models: dict[str, Path]) -> None:
    groups = on_policy(models["qwen3"], random_groups(4), PolicyVersion(0, 0))
    metrics = make(models["qwen3"], algorithm=AlgorithmConfig(minibatches=1)).update(groups)
    assert metrics["logprob_diff_max"] < 1e-5
    assert metrics["mismatch_kl"] == pytest.approx(0, abs=1e-8)
    assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-5) and metrics["ratio/max"] == pytest.approx(1, abs=1e-4)
    assert metrics["clip_ratio/region_mean"] == 0
    assert 0 < metrics["entropy"] < np.log(97)
    assert all(isinstance(value, float) and np.isfinite(value) for value in metrics.values())


def test_logprob_check_is_restricted_to_the_current_version(models: dict[str, Path]) -> None:
    """A stale group disagrees for a good reason; it must not hide whether the engine and the trainer agree."""
    fresh = on_policy(models["qwen3"], random_groups(4), PolicyVersion(0, 3))
    stale = [replace(group, group_id=f"stale-{group.group_id}") for group in random_groups(5)]
    trainer = make(models["qwen3"], algorithm=AlgorithmConfig(minibatches=1))
    trainer.policy_version = PolicyVersion(0, 3)
    assert trainer.update([*fresh, *stale])["logprob_diff_max"] < 1e-5
    trainer.policy_version = PolicyVersion(0, 9)
    assert "logprob_diff_max" not in trainer.update(fresh)
    trainer.policy_version = None
    assert trainer.update([*fresh, *stale])["logprob_diff_max"] > 0.1


def test_a_loss_that_is_not_finite_touches_no_weight(models: dict[str, Path]) -> None:
    groups = random_groups(6)
    spoilt = replace(groups[0], advantages=(float("nan"), *groups[0].advantages[1:]))
    trainer = make(models["qwen3"])
    before = weights(trainer)
    with pytest.raises(FloatingPointError, match="g0/0"):
        trainer.update([spoilt])
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


def test_a_malformed_record_is_named(models: dict[str, Path]) -> None:
    groups = random_groups(7)
    row = groups[0].rollouts[0].rows[0]
    broken = replace(row, loss_mask=np.ones_like(row.loss_mask))
    rollouts = (replace(groups[0].rollouts[0], rows=(broken,)), *groups[0].rollouts[1:])
    with pytest.raises(ValueError, match="g0/0"):
        make(models["qwen3"]).update([replace(groups[0], rollouts=rollouts)])


def test_learning_rate_is_constant_then_falls_to_its_floor() -> None:
    training = TrainingConfig(learning_rate=1.0, decay_fraction=0.33, min_lr_ratio=0.1)
    rates = [learning_rate(training, update, 24) for update in range(24)]
    assert rates[:16] == [1.0] * 16
    assert rates[-1] == pytest.approx(0.1)
    assert all(np.diff(rates[16:]) < 0)
    assert learning_rate(training, 30, 24) == pytest.approx(0.1)
    assert [learning_rate(training, 0, 1), learning_rate(replace(training, decay_fraction=0.0), 23, 24)] == [1.0, 1.0]


def test_the_rate_reaches_the_optimizer(models: dict[str, Path]) -> None:
    trainer = make(models["qwen3"], total=3, decay_fraction=1.0, min_lr_ratio=0.0)
    rates = []
    for seed in range(3):
        before = weights(trainer)
        rates.append(trainer.update(random_groups(seed))["learning_rate"])
    assert rates == pytest.approx([RATE, RATE / 2, 0.0])
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items()), (
        "a rate of 0 moved weights"
    )


@pytest.mark.parametrize("wrong", [{"zero_stage": 4}, {"decay_fraction": 2.0}, {"token_budget": 0}])
def test_wrong_settings_are_refused(models: dict[str, Path], wrong: dict) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        make(models["qwen3"], **wrong)


def test_a_model_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.path"):
        make(tmp_path)


@pytest.mark.slow
def test_no_compiler_is_needed(tmp_path: Path) -> None:
    """DeepSpeed compiles operators when it thinks that they are wanted; a fresh machine has neither gcc nor ninja."""
    code = (
        "from pipeline.cli import compose_config; from pipeline.stages.update import open_trainer;"
        "open_trainer(compose_config(['+experiment=quickstart']))"
    )
    root = str(Path(__file__).parents[2])
    environment = {
        "HOME": str(tmp_path),
        "PATH": str(tmp_path),
        "PYTHONPATH": root,
        "TORCH_EXTENSIONS_DIR": str(tmp_path),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]

"""`yoke sft`: from recordings to a model that RL starts from, on one rank and on two; what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stage_helpers import call, record
from transformers import AutoTokenizer

import pipeline
from pipeline.cli import compose_config
from pipeline.config import UserError
from pipeline.records import Outcome, Trace
from pipeline.report.metrics import read_metrics
from pipeline.stages import sft as module
from pipeline.stages.recording import rows_of, write_rows
from pipeline.stages.sft import run_sft
from pipeline.tasks.generate import draw_tasks
from pipeline.tasks.teacher import act, conversation
from pipeline.training.tiny import TinyShape, build_model, save_checkpoint

ROOT = Path(pipeline.__file__).parents[1]
SHIPPED = ROOT / "pipeline" / "assets" / "quickstart-model"
TINY = TinyShape(vocab=1024, hidden=32, layers=1, heads=1, kv_heads=1, intermediate=64)
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"properties": {"command": {}}}}}
ROLLOUTS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    save_checkpoint(build_model(tokenizer, TINY, 0), tokenizer, place)
    return place


def rollout(number: int) -> list[dict[str, Any]]:
    """Three requests of a harness that does not exist."""
    task = draw_tasks("train", ROLLOUTS, 0)[number]
    talk = conversation("You help in a shell.", task, act(task, 1))
    entries = [{"messages": talk[:end], "tools": [BASH], "answer": talk[end]} for end in (2, 4, 6)]
    calls = tuple(call(at, None) for at in range(3))
    return rows_of(f"pi--{number}", record(Outcome.SOLVED), Trace("s", calls, transcript=tuple(entries)))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_rows(tmp_path / "collect" / "pi.parquet", map(rollout, range(ROLLOUTS)), {})
    return tmp_path


def words(run_dir: Path, model: Path, *more: str) -> list[str]:
    quick = ["sft.epochs=3", "sft.learning_rate=3e-3", "sft.batch_rows=4", "sft.checkpoint_every=2"]
    return [f"run_dir={run_dir}", f"model.path={model}", "logging.wandb=disabled", "sft.ranks=1", *quick, *more]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "model" / "model.safetensors")


@pytest.mark.slow
def test_recordings_become_a_model_once_whatever_the_ranks(
    run_dir: Path, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_sft(compose_config(words(run_dir, model))) == 0
    out = capfd.readouterr().out
    assert "18 turns, 6 rows" in out and f"yoke train model.path={run_dir / 'model'}" in out
    losses = [entry["sft/loss"] for entry in read_metrics(run_dir / "sft")]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.5
    assert {"grad_norm", "learning_rate", "sft/token_accuracy"} <= read_metrics(run_dir / "sft")[0].keys()
    assert json.loads((run_dir / "sft" / "rows.json").read_text())["turns"] == 18
    assert AutoTokenizer.from_pretrained(run_dir / "model").chat_template

    assert run_sft(compose_config(words(run_dir, model))) == 0
    assert "fresh=true makes it again" in capfd.readouterr().out
    with pytest.raises(UserError, match=r"begun with another sft.learning_rate: fresh=true"):
        run_sft(compose_config(words(run_dir, model, "sft.learning_rate=1e-3")))

    alone = weights(run_dir)
    assert run_sft(compose_config(words(run_dir, model, "sft.ranks=2", "fresh=true"))) == 0  # processes of its own
    assert_equal(weights(run_dir), alone)


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    for name, value in theirs.items():
        assert float((ours[name] - value).norm() / value.norm()) < 1e-5, name


def test_the_base_model_and_the_optimiser_are_part_of_what_a_directory_was_begun_with(
    run_dir: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "learn", lambda config, place, out: None)
    assert run_sft(compose_config(words(run_dir, model))) == 0
    for key, word in {
        "ranks": "sft.ranks=2",
        "training.zero_stage": "training.zero_stage=2",
        "model.path": f"model.path={SHIPPED}",
        "rows": "harness.sampling.thinking=false",
    }.items():
        with pytest.raises(UserError, match=f"begun with another {key}"):
            run_sft(compose_config(words(run_dir, model, word)))
    assert run_sft(compose_config(words(run_dir, model, "sft.checkpoint_every=7", "concurrency=2"))) == 0
    write_rows(run_dir / "collect" / "codex.parquet", [rollout(0)], {})
    with pytest.raises(UserError, match="begun with another data"):
        run_sft(compose_config(words(run_dir, model)))


def test_a_model_that_sft_did_not_make_is_left_alone(run_dir: Path, model: Path) -> None:
    (run_dir / "model").mkdir()
    with pytest.raises(UserError, match="did not make it"):
        run_sft(compose_config(words(run_dir, model)))


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["sft.data=/nowhere"], "no recordings .* at /nowhere"),
        (["sft.max_length=10"], "no row to learn from in .*: 18 turns, 6 rows left out: too long"),
        (["sft.rows=each"], "sft.rows=each is not known"),
        (["sft.batch_rows=3", "sft.micro_rows=2"], "must be a multiple"),
        (["training.lora.rank=4"], "training.lora.rank must be null"),
        (["training.zero_stage=7"], "training.zero_stage=7 is not known"),
    ],
)
def test_what_cannot_work_is_told_in_a_line(run_dir: Path, model: Path, more: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as failure:
        run_sft(compose_config(words(run_dir, model, *more)))
    assert "\n" not in str(failure.value)
    assert not (run_dir / "sft" / "rows.json").exists()


def test_ranks_that_torchrun_started_wait_for_the_rows_of_the_first(
    run_dir: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt: list[Path] = []
    monkeypatch.setattr(module, "learn", lambda config, place, out: learnt.append(place / "rows.arrow"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(module, "ROWS_S", 0.0)
    with pytest.raises(TimeoutError, match="the first rank has not made"):
        run_sft(compose_config(words(run_dir, model)))
    monkeypatch.setenv("RANK", "0")
    assert run_sft(compose_config(words(run_dir, model))) == 0
    monkeypatch.setenv("RANK", "1")
    assert run_sft(compose_config(words(run_dir, model))) == 0
    assert learnt == [run_dir / "sft" / "rows.arrow"] * 2 and learnt[0].exists()

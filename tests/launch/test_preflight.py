"""What is refused before anything starts, without starting anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cli import compose_config
from pipeline.config import UserError
from pipeline.launch.preflight import check_settings

BARE = ["+experiment=smoke", "harness.home=/nowhere"]


def refusal(folder: Path, *words: str) -> str:
    with pytest.raises(UserError) as refused:
        check_settings(compose_config([*BARE, f"run_dir={folder / 'run'}", *words]))
    assert not (folder / "run").exists()
    return str(refused.value)


def test_every_harness_that_is_not_there_is_named_at_once(tmp_path: Path) -> None:
    said = refusal(tmp_path, "mix.harnesses=[pi,claude-code]")
    assert "yoke harness install pi" in said and "yoke harness install claude-code" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mix.readmit=[codex]"], "mix.readmit names codex: not in mix.harnesses"),
        (["+mix.weights.codex=2"], "mix.weights names codex: not in mix.harnesses"),
        (["+mix.weights.pi=0"], "mix.weights: pi has 0"),
        (["mix.set_aside_after=-1"], "mix.set_aside_after=-1 must not be negative"),
        (["harness.retries=-1"], "harness.retries=-1 must not be negative"),
        (["algorithm.max_rerolls=-1"], "algorithm.max_rerolls=-1 must not be negative"),
        (["training.updates=0"], "training.updates=0 must be at least 1"),
        (["training.zero_stage=4"], "training.zero_stage=4 is not known; choose 0, 1, 2 or 3"),
        (["training.offload=disk"], "training.offload=disk is not known; choose one of none, optimizer, all"),
        (["training.offload=all"], "training.offload=all works with training.zero_stage=3, not 1"),
        (["training.offload=optimizer", "training.zero_stage=0"], "works with training.zero_stage=1 or 2 or 3, not 0"),
        (["training.max_grad_norm=-1"], "training.max_grad_norm=-1 must be 0 (never clip) or more"),
        (["algorithm.loss=magic"], "algorithm.loss=magic is not known; choose one of ppo_clip, gspo, cispo"),
        (["algorithm.correction_low=2"], "algorithm.correction_low=2.0 and algorithm.correction_high=5.0"),
        (["algorithm.off_policy_bound=1"], "works with algorithm.decoupled=true only"),
        (["algorithm=dapo", "algorithm.overlong_tokens=10"], "algorithm.overlong_cache=4096 must lie between"),
    ],
)
def test_settings_that_cannot_work(tmp_path: Path, words: list[str], said: str) -> None:
    assert said in refusal(tmp_path, *words)


@pytest.mark.parametrize("word", ["algorithm.updates=3", "+algorithm.updates=3", "++algorithm.updates=3"])
def test_a_key_that_moved_is_told_its_new_name(word: str) -> None:
    with pytest.raises(UserError, match=r"algorithm\.updates is now called training\.updates"):
        compose_config(["+experiment=smoke", word])

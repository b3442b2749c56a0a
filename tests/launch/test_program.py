"""What a rank's program does before its rank begins."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from pipeline.cli import compose_config
from pipeline.config import Config
from pipeline.harness import base
from pipeline.launch import engine_rank, jobs, trainer_rank
from pipeline.launch.program import YokeProgram, to_config
from pipeline.launch.run_directory import Attempt, RunDirectory

RECIPE = """
import dataclasses
from pipeline.harness.pi import RECIPE as PI
RECIPE = dataclasses.replace(PI, name="mine", installation="pi")
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A run whose harness is a recipe of the user's own, in a process that has not heard of it."""
    (tmp_path / "mine.py").write_text(RECIPE)
    return compose_config(
        [f"run_dir={tmp_path / 'run'}", f"harness.recipes=[{tmp_path / 'mine.py'}]", "mix.harnesses=[mine]"]
    )


@pytest.mark.parametrize("rank", ["trainer", "engine"])
def test_every_rank_knows_the_users_own_harnesses(config: Config, rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def note(config: Config, attempt: Attempt, *_: object) -> None:
        seen.append(base.get_harness("mine").installed_as)

    monkeypatch.setattr(trainer_rank, "run_trainer", note)
    monkeypatch.setattr(engine_rank, "run_engine", note)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    program = YokeProgram(asdict(config), config.run_dir, 1)
    program._run(rank, to_config(program.config), RunDirectory(Path(config.run_dir)).attempt(1), 0)
    assert seen == ["pi"]


def test_a_report_needs_no_word_of_where_the_recipes_are(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(Path(config.run_dir))
    run.new_attempt()
    run.save_config(config)
    monkeypatch.setattr(jobs, "_report", lambda config, run: base.get_harness("mine").version == "1.6.0")
    assert jobs.report(compose_config([f"run_dir={config.run_dir}"]))

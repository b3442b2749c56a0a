"""Checkpoint evaluation as Slurm jobs: an array over checkpoint × harness, of which one task is killed on its way."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness_installs import provided
from slurm_helpers import ENDED, Testbed, wait_until

from pipeline.cli import ASSETS, compose_config
from pipeline.launch.evaluation import place, records
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.snapshot import with_absolute_paths
from pipeline.training.checkpoint import write_atomically

NAME = "000001-update-000002"
HARNESSES = ("pi", "mini-swe-agent")
SETTINGS = (
    *("+experiment=smoke", "cluster=slurm", "cluster.timeout_min=20", "tasks.check=false", "tasks.test_size=3"),
    *("mix.harnesses=[pi,mini-swe-agent]", "engine.cores=[0,1]", "concurrency=1"),
)
RUN_S = 300.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def yoke(bed: Testbed, *words: str) -> str:
    command = [sys.executable, "-m", "pipeline", *words]
    done = subprocess.run(command, env=bed.env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_model(draft: Path) -> None:
    shutil.copytree(ASSETS / "quickstart-model", draft, dirs_exist_ok=True)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that has exported a checkpoint and is, for all that anybody can see, still going on."""
    for name in HARNESSES:
        provided(name)
    config = with_absolute_paths(compose_config([f"run_dir={tmp_path / 'run'}", *SETTINGS]))
    run = RunDirectory(Path(config.run_dir))
    run.new_attempt()
    run.save_config(config)
    write_atomically(run.models / NAME, copy_model)
    return run


def test_an_array_is_evaluated_and_a_killed_task_goes_on(slurm: Testbed, run: RunDirectory) -> None:
    said = yoke(slurm, "evaluate", f"run_dir={run.root}", "stage.checkpoint=all")
    assert "1 checkpoints × 2 harnesses" in said
    array = json.loads((run.evaluation(NAME) / "jobs" / "submitted.json").read_text())["array"]
    tasks = {harness: f"{array}_{number}" for number, harness in enumerate(HARNESSES)}

    def cells(harness: str) -> list[Path]:
        return sorted(run.evaluation(NAME).glob(f"{harness}--*.parquet"))

    slow = "mini-swe-agent"  # seconds a rollout: it is killed before its last one
    wait_until(lambda: cells(slow), RUN_S, f"a cell of {slow}; {log(run, tasks[slow])}")
    first = cells(slow)[0]
    before = first.read_bytes()
    slurm.run("scontrol", "requeue", tasks[slow])
    for task in tasks.values():
        assert slurm.wait_for(task, ENDED, RUN_S) == "COMPLETED", log(run, task)
    assert {harness: len(cells(harness)) for harness in HARNESSES} == {"pi": 3, "mini-swe-agent": 3}
    assert all(record.verdict.correctness is not None for record in records(run, NAME))
    assert first.read_bytes() == before, "what was graded before stands"
    assert place(run, NAME, slow).attempt_numbers() == [1, 2]
    assert place(run, NAME, "pi").attempt_numbers() == [1]
    run.attempt(1).check_fence()

    report = subprocess.run(
        [sys.executable, "-m", "pipeline", "report", f"run_dir={run.root}"],
        env=slurm.env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert f"{NAME}" in report.stdout and "6/6" in report.stdout, report.stdout + report.stderr


def log(run: RunDirectory, task: str) -> str:
    path = run.root / "jobs" / f"{task}_0_log.out"
    return path.read_text()[-3000:] if path.exists() else f"no {path}"

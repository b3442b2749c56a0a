"""What happens to a submitted job in the queue: started, crashed, cancelled, mistaken; from the prompt and by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_helpers import ENDED, Testbed, wait_until
from submitit.helpers import CommandFunction

from pipeline.cli import compose_config
from pipeline.launch import slurm as launcher
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.snapshot import take_snapshot
from pipeline.tasks.generate import generate_tasks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL = ["cluster.gpus_per_node=0", "cluster.timeout_min=20", "harness.home=null"]


@pytest.fixture
def submit(slurm: Testbed, tmp_path: Path) -> Callable[[str, str], tuple[RunDirectory, str]]:
    """Submits a shell command in the place of the ranks' program, as the job of a run."""

    def submit(name: str, command: str) -> tuple[RunDirectory, str]:
        run = RunDirectory(tmp_path / name)
        config = compose_config(["+experiment=smoke", "cluster=slurm", f"run_dir={run.root}", *SMALL])
        run.save_config(config)
        executor = launcher.make_executor(config, run, take_snapshot(run)[0])
        return run, launcher.send(executor, CommandFunction(["sh", "-c", command], verbose=False))

    return submit


def reasons(run: RunDirectory) -> list[str]:
    path = run.root / "jobs" / "requeues.jsonl"
    return [json.loads(line)["why"] for line in path.read_text().splitlines()] if path.exists() else []


def test_a_crash_is_requeued_and_a_cancelled_job_is_not(
    slurm: Testbed, submit: Callable[[str, str], tuple[RunDirectory, str]]
) -> None:
    crashed, crash = submit("crashed", 'test "${SLURM_RESTART_COUNT:-0}" = 1')
    cancelled, victim = submit("cancelled", "sleep 300")
    slurm.wait_for(victim, ("RUNNING",))
    wait_until(lambda: list((cancelled.root / "jobs").glob("*_0_log.out")), 60.0, "the victim's first words")
    slurm.run("scancel", victim)
    assert slurm.wait_for(victim, ENDED) == "CANCELLED"
    wait_until(lambda: reasons(crashed), 120.0, "the first start's end")
    assert slurm.wait_for(crash, ENDED, 180.0) == "COMPLETED"
    assert slurm.restarts(crash) == 1 and slurm.restarts(victim) == 0
    assert [why.partition(":")[0] for why in reasons(crashed)] == ["requeued after a crash (1 of 20 restarts)"]
    assert not any(why.startswith("requeued") for why in reasons(cancelled))


@pytest.fixture
def mistaken(tmp_path: Path) -> list[str]:
    """Settings with a task whose own solution does not solve it, which only the job finds out."""
    folders = [generate_tasks(tmp_path / "tasks", split, 1, 0) for split in ("train", "test")]
    (next(folders[0].iterdir()) / "solution" / "solve.sh").write_text("#!/bin/sh\ntrue\n")
    return [
        "+experiment=smoke",
        "tasks=harbor",
        f"tasks.train={folders[0]}",
        f"tasks.test={folders[1]}",
        *SMALL,
        f"run_dir={tmp_path / 'run'}",
    ]


@pytest.mark.parametrize("way", ["from the prompt", "by hand"])
def test_a_user_s_mistake_ends_the_job_with_its_reason(
    slurm: Testbed, tmp_path: Path, mistaken: list[str], way: str
) -> None:
    yoke = [sys.executable, "-m", "pipeline", "train"]
    if way == "from the prompt":
        submitted = subprocess.run([*yoke, "cluster=slurm", *mistaken], capture_output=True, text=True, check=True)
        job = json.loads((tmp_path / "run" / "submission.json").read_text())["job_id"]
        assert f"submitted job {job}: 1 node" in submitted.stdout
        again = subprocess.run([*yoke, "cluster=slurm", *mistaken], capture_output=True, text=True, check=True)
        assert f"is in job {job} already" in again.stdout
    else:
        (tmp_path / "yoke").write_text(f'#!/bin/sh\nexec {sys.executable} -m pipeline "$@"\n')
        (tmp_path / "yoke").chmod(0o755)
        options = ["--gpus-per-node=0", "--cpus-per-task=2", "--mem=2G", "--time=20", f"--output={tmp_path}/out"]
        environment = slurm.env | {"YOKE": str(tmp_path / "yoke")}
        command = ["sbatch", "--parsable", *options, "slurm/train.sbatch", *mistaken]
        job = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()
    assert slurm.wait_for(job, ENDED, 240.0) == "FAILED"
    assert slurm.restarts(job) == 0
    said = reasons(RunDirectory(tmp_path / "run"))
    assert len(said) == 1 and "this must be mended first: 1 of 2 tasks fail their own check" in said[0]


@pytest.mark.parametrize("script", sorted((ROOT / "slurm").glob("*.sbatch"), key=str), ids=lambda path: path.stem)
def test_slurm_takes_the_scripts_as_they_are(slurm: Testbed, script: Path, tmp_path: Path) -> None:
    assert os.access(script, os.X_OK) and len(script.read_text().splitlines()) <= 40
    slurm.run("sbatch", "--test-only", "--mem=2G", "--cpus-per-task=2", script)

"""A sweep of three points as a user makes it: three jobs on the private Slurm, on hold or each a real training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from slurm_helpers import ENDED, Testbed

SWEEP = [
    "+experiment=smoke",
    "algorithm.aggregation=group_mean,token_mean,constant",
    "cluster=slurm",
    "cluster.gpus_per_node=0",
    "training.updates=1",
    "algorithm.group_size=2",
    "algorithm.groups_per_update=2",
    "tasks.train_size=4",
    "tasks.test_size=2",
    "tasks.check=false",
    "evaluation.before=false",
    "logging.wandb=offline",
    "sweep.name=three",
]
NAMES = [f"aggregation-{name}" for name in ("group_mean", "token_mean", "constant")]
DONE_S = 360.0

pytestmark = pytest.mark.slow


def yoke(slurm: Testbed, *words: str | Path) -> str:
    command = [sys.executable, "-m", "pipeline", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=slurm.env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def report(slurm: Testbed, root: Path) -> dict[str, dict[str, Any]]:
    yoke(slurm, "report", root)
    return {point["name"]: point for point in json.loads((root / "report" / "results.json").read_text())["points"]}


def submitted(root: Path) -> dict[str, str]:
    """The job of each run."""
    return {name: json.loads((root / name / "submission.json").read_text())["job_id"] for name in NAMES}


@pytest.mark.timeout(300)
def test_what_has_left_the_queue_is_submitted_again(slurm: Testbed, tmp_path: Path) -> None:
    """Jobs on hold, so that nothing runs."""
    words = [*SWEEP, f"sweep.root={tmp_path}", "+cluster.sbatch.hold=true"]
    root = tmp_path / "sweep-three"
    yoke(slurm, "train", "-m", *words)
    before = submitted(root)
    assert {slurm.state(job) for job in before.values()} == {"PENDING"}
    slurm.run("scancel", before[NAMES[1]])
    slurm.wait_for(before[NAMES[1]], ENDED)
    states = {name: point["state"] for name, point in report(slurm, root).items()}
    assert states == {NAMES[0]: "queued", NAMES[1]: "stopped", NAMES[2]: "queued"}
    assert yoke(slurm, "train", "-m", *words).count("queued already") == 2
    after = submitted(root)
    assert {name for name in NAMES if after[name] != before[name]} == {NAMES[1]}


@pytest.mark.timeout(600)
def test_three_points_are_submitted_run_and_reported(slurm: Testbed, tmp_path: Path) -> None:
    root = tmp_path / "sweep-three"
    said = yoke(slurm, "train", "-m", *SWEEP, f"sweep.root={tmp_path}")
    jobs = submitted(root)
    assert len(set(jobs.values())) == 3 and all(f"{name}: job {job}" in said for name, job in jobs.items())
    assert {point["state"] for point in report(slurm, root).values()} <= {"queued", "running"}, "at the prompt again"

    for job in jobs.values():
        slurm.wait_for(job, ENDED, DONE_S)
    points = report(slurm, root)
    assert [points[name]["state"] for name in NAMES] == ["done"] * 3, points
    assert all(point["updates"] == 1 and point["after"]["n"] == 2 and point["wall_s"] > 0 for point in points.values())
    assert (root / "report" / "curves.png").stat().st_size > 10_000
    assert all(list((root / name).glob("wandb/offline-run-*/*.wandb")) for name in NAMES), "each in its own"
    assert yoke(slurm, "train", "-m", *SWEEP, f"sweep.root={tmp_path}").count("done before") == 3
    assert submitted(root) == jobs

"""`yoke status` and `yoke stop` ask a real Slurm; the job that they ask about is a stand-in for a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_up_runs import MadeUpRun
from slurm_helpers import Testbed, wait_until

from pipeline.launch.squeue import find_jobs
from pipeline.launch.status import RunWatcher, Watch
from pipeline.launch.stop import Stopper, stop_all

# A rank that ends by USR1 as ours do: it leaves word, then ends well.
RANK = """
trap 'echo "{{}}" > {stopped}; exit 0' USR1
touch {ready}-$SLURM_PROCID
while true; do sleep 0.1; done
"""
JOB = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --time=30 --output=/dev/null
srun --kill-on-bad-exit=1 bash {rank}
"""
END_S = 60.0


@pytest.fixture
def run(tmp_path: Path) -> MadeUpRun:
    return MadeUpRun(tmp_path / "run")


def submit(slurm: Testbed, run: MadeUpRun, *options: str) -> str:
    """The job's id."""
    script, rank = run.root / "job.sh", run.root / "rank.sh"
    script.write_text(JOB.format(rank=rank))
    rank.write_text(RANK.format(stopped=run.run.attempt(1).root / "stopped.json", ready=run.root / "ready"))
    job = slurm.sbatch(*options, script)
    run.submitted(job)
    return job


def look(run: MadeUpRun) -> dict[str, Any]:
    return Watch([RunWatcher(run.root)]).look()[0]


@pytest.mark.slow
def test_a_job_is_followed_from_the_queue_to_its_end(slurm: Testbed, run: MadeUpRun) -> None:
    job = submit(slurm, run, "--hold")
    assert (look(run)["state"], look(run)["reason"]) == ("queued", "JobHeldUser")
    assert list(find_jobs([job, "99999999"])) == [job], "an id that Slurm does not know is no error"
    assert find_jobs(["99999999"]) == {}
    slurm.run("scontrol", "release", job)
    wait_until(lambda: all((run.root / f"ready-{rank}").exists() for rank in range(2)), END_S, "both ranks")
    run.slurm_attempt(job)
    now = look(run)
    assert (now["state"], now["job"]["state"], now["job"]["count"]) == ("running", "RUNNING", "2")
    assert now["job"]["nodes"].startswith("n[")
    assert now["job"]["left"].startswith(("29:", "30:"))
    assert stop_all([Stopper(RunWatcher(run.root), END_S)]) == 0
    assert slurm.state(job) == "COMPLETED", "USR1 reached the ranks, not the batch script"
    assert look(run)["state"] == "stopped"


@pytest.mark.slow
def test_a_queued_job_is_cancelled(slurm: Testbed, run: MadeUpRun, capsys: pytest.CaptureFixture[str]) -> None:
    job = submit(slurm, run, "--hold")
    assert stop_all([Stopper(RunWatcher(run.root), END_S)]) == 0
    assert slurm.state(job) == "CANCELLED"
    assert look(run)["state"] == "stopped"
    assert f"job {job} is taken out of the queue" in capsys.readouterr().out

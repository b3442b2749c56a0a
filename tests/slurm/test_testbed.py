"""The testbed behaves like the Slurm that users have, in all that Yoke relies on; and it leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from slurm_helpers import ENDED, SCRIPTS, Testbed, alive, kill, wait_until

JOB = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --time=30 --signal=USR2@60 --requeue
#SBATCH --open-mode=append --output={log}
srun --kill-on-bad-exit=1 bash {task}
"""
TASK = """
trap 'echo "$SLURM_PROCID: warned"; exit 0' USR2
echo "$SLURM_PROCID: start ${SLURM_RESTART_COUNT:-0} on $SLURMD_NODENAME with GPUs $CUDA_VISIBLE_DEVICES"
while true; do sleep 0.2; done
"""
NOBODY = 65534
LONG = "#!/bin/bash\nsetsid sleep 987 &\nsleep 987\n"


def write_job(directory: Path) -> tuple[Path, Path]:
    """A two-node job that says who it is, and where it says so."""
    log, task, job = directory / "job.log", directory / "task.sh", directory / "job.sh"
    task.write_text(TASK)
    job.write_text(JOB.format(log=log, task=task))
    return job, log


def wait_for_lines(log: Path, word: str, count: int, timeout_s: float = 90.0) -> list[str]:
    def lines() -> list[str]:
        return [line for line in log.read_text().splitlines() if word in line] if log.exists() else []

    wait_until(lambda: len(lines()) >= count, timeout_s, f"{count} lines with '{word}' in {log}")
    return sorted(lines())


@pytest.mark.slow
def test_two_nodes_with_two_gpus_each_and_a_requeue(slurm: Testbed, tmp_path: Path) -> None:
    script, log = write_job(tmp_path)
    job = slurm.sbatch(script)
    started = wait_for_lines(log, "start 0", 4)
    places = [line.split("on ")[1] for line in started]
    assert places[0] == places[1] != places[2] == places[3], "two ranks on each of two nodes"
    assert all(place.endswith("with GPUs 0,1") for place in places)
    slurm.run("scontrol", "requeue", job)
    wait_for_lines(log, "start 1", 4)
    assert slurm.restarts(job) == 1


@pytest.mark.slow
def test_a_preempted_job_is_warned_and_requeued(slurm: Testbed, tmp_path: Path) -> None:
    script, log = write_job(tmp_path)
    job = slurm.sbatch("--partition=preempt", script)
    wait_for_lines(log, "start 0", 4)
    slurm.sbatch("--nodes=3", "--gpus-per-node=2", "--time=10", "--wrap=sleep 600", "--output=/dev/null")
    wait_for_lines(log, "warned", 4)
    assert slurm.wait_for(job, (*ENDED, "PENDING")) in ("COMPLETED", "PENDING")


@pytest.mark.slow
def test_a_dead_node_costs_its_job_a_restart_elsewhere(slurm: Testbed, tmp_path: Path) -> None:
    script, log = write_job(tmp_path)
    job = slurm.sbatch(script)
    wait_for_lines(log, "start 0", 4)
    node = slurm.info(job)["BatchHost"]
    ghosts = slurm.node_processes(node)
    try:
        slurm.kill_node(node, ghost=True)
        again = wait_for_lines(log, "start 1", 4)
        assert not any(f"on {node} " in line for line in again)
        assert set(ghosts) & set(slurm.node_processes(node)), "the dead node's processes live on"
    finally:
        for pid in ghosts:
            kill(pid)
        slurm.start()


@pytest.mark.slow
def test_two_at_once_and_nothing_left_behind(tmp_path: Path) -> None:
    beds = [Testbed(tmp_path / name) for name in ("a", "b")]
    starts = [subprocess.Popen([SCRIPTS / "start.sh", bed.directory]) for bed in beds]
    assert [start.wait(150) for start in starts] == [0, 0]
    try:
        (tmp_path / "long.sh").write_text(LONG)
        jobs = [bed.sbatch("--output=/dev/null", tmp_path / "long.sh") for bed in beds]
        for bed, job in zip(beds, jobs, strict=True):
            bed.wait_for(job, ("RUNNING",))
            wait_until(lambda bed=bed: len(bed.node_processes("n1")) >= 4, 60.0, "the job's processes")
        doomed, spared = (bed.node_processes("n1") for bed in beds)
        before = beds[0].conf.read_text()
        beds[0].start()
        assert beds[0].conf.read_text() == before, "a second start changes nothing"
        beds[0].kill_node("n1", ghost=True)
        beds[0].stop()
        assert not any(alive(pid) for pid in doomed)
        assert all(alive(pid) for pid in spared), "the other testbed goes on"
        assert beds[1].state(jobs[1]) == "RUNNING"
    finally:
        for bed in beds:
            bed.stop()


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="the other tests of this file show it: they run as a plain user")
def test_a_plain_user_can_have_one() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        home = Path(place)
        shutil.copytree(SCRIPTS, home / "scripts")
        home.chmod(0o755)
        (home / "bed").mkdir()
        os.chown(home / "bed", NOBODY, NOBODY)
        as_nobody = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        subprocess.run([*as_nobody, home / "scripts" / "start.sh", home / "bed"], check=True, timeout=150)
        try:
            who = ["srun", "--nodes=2", "--gpus-per-node=2", "bash", "-c", "echo $(id -u) $CUDA_VISIBLE_DEVICES"]
            environment = os.environ | {"SLURM_CONF": str(home / "bed" / "slurm.conf")}
            lines = subprocess.check_output([*as_nobody, *who], env=environment, cwd="/tmp", text=True, timeout=60)
            assert lines.split("\n")[:2] == [f"{NOBODY} 0,1"] * 2
        finally:
            subprocess.run([*as_nobody, home / "scripts" / "stop.sh", home / "bed"], check=True, timeout=60)

"""What is submitted to Slurm, word for word; what is refused before; what a plan says. No Slurm is needed here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cli import compose_config
from pipeline.config import ClusterConfig, Config, UserError
from pipeline.launch import jobs, preflight, slurm
from pipeline.launch.allocation import launch as launch_in_allocation
from pipeline.launch.allocation import own_share
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.snapshot import SOURCE

SCRIPT = """#!/bin/bash

# Parameters
#SBATCH --account=me
#SBATCH --constraint='a100|h100'
#SBATCH --cpus-per-task=16
#SBATCH --exclude=node7
#SBATCH --gpus-per-node=2
#SBATCH --job-name=yoke-four
#SBATCH --mem=102400M
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=2
#SBATCH --open-mode=append
#SBATCH --output=/shared/four/jobs/%j_0_log.out
#SBATCH --partition=gpu
#SBATCH --qos=long
#SBATCH --requeue
#SBATCH --signal=USR2@90
#SBATCH --time=600

# setup
module load cuda/12.8
export PYTHONPATH=/shared/four/code/abc${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /shared/four/jobs/%j_%t_log.out --kill-on-bad-exit=1 --cpu-bind=none --mpi=none \
--cpus-per-task=16 PYTHON -u -m submitit.core._submit /shared/four/jobs


# teardown
rc=$?
PYTHON -m pipeline.launch.requeue /shared/four "$rc"
exit "$rc\""""


@pytest.fixture
def harnesses_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_check_harnesses", lambda config: None)


def smoke(folder: Path, *words: str) -> Config:
    return compose_config(["+experiment=smoke", f"run_dir={folder / 'run'}", *words])


def script_of(cluster: ClusterConfig) -> str:
    config = replace(Config(run_dir="/shared/four"), cluster=cluster)
    executor = slurm.make_executor(config, RunDirectory(Path("/shared/four")), Path("/shared/four/code/abc"))
    return executor._make_submission_file_text(executor._submitit_command_str, "x").replace(sys.executable, "PYTHON")


def test_every_setting_is_in_the_script() -> None:
    cluster = ClusterConfig(
        "slurm",
        nodes=3,
        gpus_per_node=2,
        cpus_per_task=16,
        mem_gb=100,
        timeout_min=600,
        partition="gpu",
        account="me",
        qos="long",
        constraint="a100|h100",
        sbatch={"exclude": "node7"},
        srun=["--mpi=none"],
        setup=["module load cuda/12.8"],
        signal_s=90,
    )
    assert script_of(cluster) == SCRIPT


def test_what_is_not_set_is_left_to_the_site() -> None:
    script = script_of(ClusterConfig("slurm", gpus_per_node=0))
    assert not re.search(r"gpus|mem|cpus-per-task|partition|account|qos|constraint|wckey|None", script)


def test_the_script_ends_as_srun_did(tmp_path: Path) -> None:
    script = "\n".join(["(exit 7)", *slurm.requeue_lines(RunDirectory(tmp_path))])
    done = subprocess.run(["bash", "-c", script.replace(sys.executable, "echo")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, f"-m pipeline.launch.requeue {tmp_path} 7\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cluster=slurm", "+cluster.sbatch.nodes=2"], "cluster.sbatch.nodes: set cluster.nodes instead"),
        (["cluster=slurm", "+cluster.sbatch.open_mode=truncate"], "cluster.sbatch.open-mode: Yoke sets it"),
        (["cluster=slurm", "cluster.signal_s=600", "cluster.timeout_min=10"], "cluster.timeout_min=10 minutes"),
        (["cluster=slurm", "cluster.max_requeues=-1"], "cluster.max_requeues=-1 must not be negative"),
        (["cluster=slurm", "cluster.mem_gb=-1"], "cluster.mem_gb=-1.0 must be at least 1"),
        (["cluster=slurm", "cluster.cpus_per_task=0"], "cluster.cpus_per_task=0 must be at least 1"),
        (["cluster=slurm", "cluster.gpus_per_node=-1"], "cluster.gpus_per_node=-1 must not be negative"),
        (["cluster.nodes=2"], "more than this machine needs cluster=slurm"),
    ],
)
@pytest.mark.usefixtures("harnesses_installed")
def test_settings_of_the_job_that_cannot_work(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(UserError) as refused:
        jobs.train(smoke(tmp_path, *words, "dry_run=true"))
    assert said in str(refused.value) and not (tmp_path / "run").exists()


@pytest.mark.usefixtures("harnesses_installed")
def test_the_login_node_needs_no_sandbox_and_no_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: object) -> None:
        raise UserError("not on a login node")

    monkeypatch.setattr(preflight, "choose_sandbox", unavailable)
    monkeypatch.setattr(preflight, "reserve_port", unavailable)
    preflight.check_settings(smoke(tmp_path, "cluster=slurm"))
    with pytest.raises(UserError, match="not on a login node"):
        preflight.check_settings(smoke(tmp_path))


@pytest.mark.parametrize("cluster", ["slurm", "local"])
@pytest.mark.usefixtures("harnesses_installed")
def test_a_dry_run_tells_the_plan_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # no Slurm is asked
    assert jobs.train(smoke(tmp_path, f"cluster={cluster}", "dry_run=true", "concurrency=5")) == 0
    said = capsys.readouterr().out
    for words in ("5 at once", "6, each of 3 groups of 4 = 12 rollouts", "every 2 updates", "before and after"):
        assert words in said
    assert ("#SBATCH --nodes=1" in said) == (cluster == "slurm")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("root", "place"), [("/tmp/run", "/tmp"), ("/tmpfs/run", None), ("/dev/shm/a/b", "/dev/shm")])
def test_a_directory_that_the_nodes_can_hardly_see(root: str, place: str | None) -> None:
    said = slurm.text(smoke(Path(root), "cluster=slurm"), RunDirectory(Path(root)))
    assert (f"beware       {place} is mostly each machine's own" in said) == (place is not None)
    assert ("beware" in said) == (place is not None)


@pytest.mark.usefixtures("harnesses_installed")
def test_the_checkout_is_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is the checkout"):
        preflight.check_settings(replace(smoke(tmp_path), run_dir=str(SOURCE)))


@pytest.mark.usefixtures("harnesses_installed")
def test_without_sbatch_it_says_where_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="sbatch is not installed here"):
        jobs.train(smoke(tmp_path, "cluster=slurm"))


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a shell script in the place of one of Slurm's commands."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def put(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return put


@pytest.mark.parametrize(
    ("stderr", "kind", "said"),
    [
        ("sbatch: error: invalid account", UserError, "sbatch refused the job: invalid account"),
        ("sbatch: error: Unable to contact slurm controller", slurm.SlurmError, "Slurm does not answer"),
    ],
)
def test_sbatch_s_own_words_are_passed_on_once(
    tmp_path: Path,
    programs: Callable[[str, str], None],
    capfd: pytest.CaptureFixture[str],
    stderr: str,
    kind: type[Exception],
    said: str,
) -> None:
    programs("sbatch", f"echo '{stderr}' >&2; exit 1")
    config = smoke(tmp_path, "cluster=slurm")
    run = RunDirectory(Path(config.run_dir))
    with pytest.raises(kind, match=said):
        slurm.submit(config, run)
    assert capfd.readouterr().err == ""
    assert not (run.root / "submission.json").exists()


def test_a_job_that_is_submitted_from_a_job_is_another_one(
    tmp_path: Path, programs: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs("sbatch", f"env > {tmp_path}/env; echo Submitted batch job 42")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_CONF", "/etc/here")
    config = smoke(tmp_path, "cluster=slurm")
    assert slurm.submit(config, RunDirectory(Path(config.run_dir))) == "42"
    given = (tmp_path / "env").read_text()
    assert "SLURM_NTASKS" not in given and "SLURM_CONF=/etc/here" in given
    assert os.environ["SLURM_NTASKS"] == "8"


@pytest.mark.parametrize(
    ("script", "state"),
    [
        ("echo '7|RUNNING|n1|1|1:00|None|N/A'", "RUNNING"),
        ("echo '7|COMPLETED|n1|1|1:00|None|N/A'", None),
        ("true", None),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", None),
    ],
)
def test_the_state_of_a_job(programs: Callable[[str, str], None], script: str, state: str | None) -> None:
    programs("squeue", script)
    assert slurm.job_state("7") == state


def test_silence_is_not_taken_for_an_end(programs: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    programs("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(slurm.SlurmError, match="Unable to contact"):
        slurm.job_state("7")
    programs("squeue", "exec sleep 60")
    monkeypatch.setattr(slurm, "QUERY_S", 0.2)
    with pytest.raises(slurm.SlurmError, match="did not answer"):
        slurm.job_state("7")


def test_a_run_that_is_in_a_job_is_left_to_it(
    tmp_path: Path, programs: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    programs("squeue", "echo '7|PENDING||1|1:00|Priority|N/A'")
    config = smoke(tmp_path, "cluster=slurm")
    run = RunDirectory(Path(config.run_dir))
    slurm.record_submission(config, run, "7", tmp_path)
    assert jobs.train(config) == 0
    assert "in job 7 already (pending)" in capsys.readouterr().out
    with pytest.raises(UserError, match="in use by job 7"):
        jobs.verify(config)
    with pytest.raises(UserError, match="in use by job 7"):
        jobs.verify(replace(config, fresh=True))


def test_an_allocation_is_a_job_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    config = smoke(tmp_path, "cluster=allocation")
    with pytest.raises(UserError, match="runs inside an sbatch job"):
        launch_in_allocation(config, RunDirectory(Path(config.run_dir)))


@pytest.mark.parametrize("step", [1, 3])
def test_the_tasks_of_an_array_share_the_work_out(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    assert own_share("abcdefg") == "abcdefg"
    monkeypatch.setenv("SLURM_ARRAY_TASK_MIN", "4")
    monkeypatch.setenv("SLURM_ARRAY_TASK_STEP", str(step))
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "3")
    shares = []
    for task in range(3):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(4 + step * task))
        shares.append(own_share("abcdefg"))
    assert shares == ["adg", "be", "cf"]

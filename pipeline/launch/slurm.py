"""Submit a run as one Slurm job through submitit, or print what that would be; ask Slurm about jobs.

Each node has two tasks: local rank 0 trains, local rank 1 serves and rolls out. What happens after a crash is decided
by the batch script's last lines (requeue.py).
"""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError

from pipeline.config import ClusterConfig, Config, UserError
from pipeline.launch.plan import plan
from pipeline.launch.program import YokeProgram
from pipeline.launch.requeue import own_job
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.snapshot import take_snapshot, with_absolute_paths
from pipeline.launch.squeue import QueueSilent, find_jobs
from pipeline.report.store import write_text

TASKS_PER_NODE = 2
QUERY_S = 30.0
NO_TIMEOUT_BOUND = 1_000_000  # submitit counts a preemption of a short job as a time-out: cluster.max_requeues counts
CODE = "CODE"  # stands for the snapshot in a plan, which takes none
SET_BY_US = {  # sbatch options that have a key of their own, or that the launcher relies on
    "nodes": "cluster.nodes",
    "gpus-per-node": "cluster.gpus_per_node",
    "cpus-per-task": "cluster.cpus_per_task",
    "mem": "cluster.mem_gb",
    "time": "cluster.timeout_min",
    "partition": "cluster.partition",
    "account": "cluster.account",
    "qos": "cluster.qos",
    "constraint": "cluster.constraint",
    "signal": "cluster.signal_s",
    "job-name": "run_dir",
    **dict.fromkeys(
        ("ntasks-per-node", "ntasks", "output", "error", "open-mode", "requeue", "no-requeue", "array"), ""
    ),
}


MACHINES_OWN = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # on most clusters each node has its own


class SlurmError(RuntimeError):
    """Slurm did not answer, or failed for a reason that is not a setting's fault."""


class _Executor(submitit.SlurmExecutor):
    """submitit's, which can also print a script where there is no Slurm."""

    @classmethod
    def affinity(cls) -> int:
        return 2


# --- submit


def launch(config: Config, run: RunDirectory) -> int:
    """`yoke train cluster=slurm`: submit the run and say how to follow it."""
    job_id = submit(config, run)
    print(f"submitted job {job_id}: {config.cluster.nodes} node{'s' * (config.cluster.nodes > 1)}, {run.root}")
    print(f"  follow    yoke status {run.root} --watch")
    print(f"  stop      yoke stop {run.root}")
    if private := own_place(run):
        print(f"  beware    {private}")
    print(f"  logs      {run.attempts}/NNNN/logs; of the start: {run.root}/jobs/{job_id}_0_log.out")
    return 0


def submit(config: Config, run: RunDirectory) -> str:
    """Copy the code into the run directory and submit the run. Returns the job id, which submission.json keeps.

    The caller has checked the settings and kept them (config.yaml). Raises UserError when Slurm refuses the job, and
    SlurmError when it does not answer.
    """
    config = with_absolute_paths(config)
    code, new = take_snapshot(run)
    if new and len(list(code.parent.glob("[!.]*"))) > 1:
        print(f"the code has changed since the last submission: this job runs {code}")
    executor = make_executor(config, run, code)
    job_id = send(executor, YokeProgram(asdict(config), str(run.root)))
    record_submission(config, run, job_id, code)
    return job_id


def own_place(run: RunDirectory) -> str | None:
    """A warning when the nodes can hardly see the run directory."""
    place = next((place for place in MACHINES_OWN if run.root.is_relative_to(place)), None)
    return place and f"{place} is mostly each machine's own: nodes that do not see {run.root} cannot start the run"


def record_submission(config: Config, run: RunDirectory, job_id: str, code: Path) -> None:
    """Leave word of the job that the run is in; its own settings of the cluster may be newer than the run's."""
    record = {"job_id": job_id, "time": time.time(), "code": str(code), "max_requeues": config.cluster.max_requeues}
    write_text(run.root / "submission.json", json.dumps(record))


def text(config: Config, run: RunDirectory) -> str:
    """The plan of the run and the batch script that would be submitted. Writes nothing."""
    config = with_absolute_paths(config)
    executor = make_executor(config, run, run.root / "code" / CODE)
    script = executor._make_submission_file_text(executor._submitit_command_str, "plan")
    beware = f"beware       {private}\n" if (private := own_place(run)) else ""
    return f"{plan(config, run)}\n{beware}\n--- sbatch script ({CODE} is the copy of the code)\n{script}"


def make_executor(config: Config, run: RunDirectory, code: Path, **changes: Any) -> submitit.SlurmExecutor:
    """What submits jobs of this run, with ``changes`` to submitit's parameters. Raises UserError for a bad option."""
    executor = _Executor(folder=run.root / "jobs", max_num_timeout=NO_TIMEOUT_BOUND)
    try:
        executor.update_parameters(**(parameters(config.cluster, run, code) | changes))
    except ValueError as error:
        raise UserError(f"cluster settings: {error}") from error
    return executor


def parameters(cluster: ClusterConfig, run: RunDirectory, code: Path) -> dict[str, Any]:
    """submitit's parameters for the run's own job."""
    cpus = [] if cluster.cpus_per_task is None else [f"--cpus-per-task={cluster.cpus_per_task}"]  # srun inherits it not
    given = {
        "job_name": f"yoke-{run.root.name}",
        "nodes": cluster.nodes,
        "ntasks_per_node": TASKS_PER_NODE,
        "gpus_per_node": cluster.gpus_per_node or None,
        "cpus_per_task": cluster.cpus_per_task,
        "mem": None if cluster.mem_gb is None else f"{round(cluster.mem_gb * 1024)}M",
        "time": cluster.timeout_min,
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "signal_delay_s": cluster.signal_s,
        "wckey": None,
        "stderr_to_stdout": True,
        "srun_args": srun_options(cluster) + cpus,
        "setup": setup_lines(cluster, code),
        "teardown": requeue_lines(run),
        "additional_parameters": {"requeue": True} | cluster.sbatch,
    }
    return {key: value for key, value in given.items() if value is not None or key == "wckey"}


def srun_options(cluster: ClusterConfig) -> list[str]:
    """One dead rank ends all; the two tasks of a node share its cores, for the engine needs more than the trainer."""
    return ["--kill-on-bad-exit=1", "--cpu-bind=none", *cluster.srun]


def setup_lines(cluster: ClusterConfig, code: Path) -> list[str]:
    """Shell lines before srun: the site's, then the run's own copy of the code in front of what is installed."""
    return [
        *cluster.setup,
        f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}} PYTHONSAFEPATH=1",
    ]


def requeue_lines(run: RunDirectory) -> list[str]:
    """Shell lines after srun. The script ends as srun did, so that Slurm shows a crash as FAILED."""
    command = shlex.join([sys.executable, "-m", "pipeline.launch.requeue", str(run.root)])
    return ["rc=$?", f'{command} "$rc"', 'exit "$rc"']


def send(executor: submitit.SlurmExecutor, program: Any) -> str:
    """Submit ``program`` and return the job's id. Raises UserError when sbatch refuses it, else SlurmError."""
    return send_all(executor, [program])[0]


def send_all(executor: submitit.SlurmExecutor, programs: Sequence[Any]) -> list[str]:
    """Submit several programs as one array. Returns the ids of its tasks; raises as ``send``."""
    if shutil.which("sbatch") is None:
        raise UserError("sbatch is not installed here: run this on a login node of the cluster, or use cluster=local")
    try:
        with _no_job_around(), redirect_stderr(io.StringIO()):  # submitit prints there what the error says too
            with executor.batch():
                jobs = [executor.submit(program) for program in programs]
    except FailedJobError as error:
        raise _refusal(str(error)) from error
    for job in jobs:
        job._cancel_at_deletion = False
    return [str(job.job_id) for job in jobs]


def _refusal(said: str) -> Exception:
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in said.splitlines() if line.strip()]
    line = "; ".join(lines) or "no reason given"
    if any(word in line.lower() for word in ("contact slurm", "timed out", "socket", "connection")):
        return SlurmError(f"Slurm does not answer: {line}")
    return UserError(f"sbatch refused the job: {line}")


def is_of_a_job(name: str) -> bool:
    """Whether Slurm or submitit sets this variable within a job."""
    return name.startswith(("SLURM_", "SLURMD_", "SUBMITIT_")) and name != "SLURM_CONF"


@contextmanager
def _no_job_around() -> Iterator[None]:
    """A job that is submitted from within a job must not take its size or its restarts for its own."""
    kept = dict(os.environ)
    for name in kept:
        if is_of_a_job(name):
            del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(kept)


# --- ask


def job_state(job_id: str) -> str | None:
    """PENDING, RUNNING, COMPLETING …, or None when the job is not in the queue (any more). Raises SlurmError."""
    try:
        job = find_jobs([job_id], QUERY_S).get(job_id)
    except QueueSilent as error:
        raise SlurmError(str(error)) from error
    return job.state if job and (job.waits or job.is_on) else None


def queued(run: RunDirectory) -> tuple[str, str] | None:
    """(job id, state) of the run's job while it is in the queue, unless that is the job that asks.

    Raises SlurmError when Slurm does not answer.
    """
    path = run.root / "submission.json"
    if not path.exists() or shutil.which("squeue") is None:
        return None
    job_id = json.loads(path.read_text())["job_id"]
    state = None if job_id == own_job() else job_state(job_id)
    return (job_id, state) if state else None

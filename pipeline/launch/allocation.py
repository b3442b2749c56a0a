"""`yoke train cluster=allocation`: the run inside an sbatch job that the user submitted (slurm/train.sbatch).

The same program under the same srun as in slurm.py, started from the job's batch step.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from submitit.core.utils import DelayedSubmission, JobPaths

from pipeline.config import Config, UserError
from pipeline.launch.program import YokeProgram
from pipeline.launch.rendezvous import restart_count
from pipeline.launch.requeue import after_srun, own_job
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.slurm import (
    NO_TIMEOUT_BOUND,
    TASKS_PER_NODE,
    record_submission,
    setup_lines,
    srun_options,
)
from pipeline.launch.snapshot import take_snapshot

T = TypeVar("T")


def restarted() -> bool:
    """Whether this is a later start of the same Slurm job: what it made before must stay."""
    return restart_count() > 0


def own_share(items: Sequence[T]) -> Sequence[T]:
    """What of ``items`` this task of a Slurm array has to do: as much as every other one; all outside of an array."""
    given = {name: os.environ.get(f"SLURM_ARRAY_TASK_{name}") for name in ("ID", "MIN", "STEP", "COUNT")}
    if given["COUNT"] is None:
        return items
    number = {name: int(value or 1) for name, value in given.items()}
    return items[(number["ID"] - number["MIN"]) // number["STEP"] :: number["COUNT"]]


def launch(config: Config, run: RunDirectory) -> int:
    """Run to the end of this job; the exit code is srun's. Raises UserError outside of a job."""
    config = replace(config, cluster=replace(config.cluster, nodes=_nodes()))
    job_id = own_job() or ""
    paths = JobPaths(run.root / "jobs", job_id=job_id)
    code = _code(run, paths)
    paths.folder.mkdir(parents=True, exist_ok=True)
    submission = DelayedSubmission(YokeProgram(asdict(config), str(run.root)))
    submission.set_timeout(config.cluster.timeout_min, NO_TIMEOUT_BOUND)
    submission.dump(paths.submitted_pickle)
    record_submission(config, run, job_id, code)
    print(f"yoke: job {job_id} on {_nodes()} nodes; logs in {run.attempts}/NNNN/logs", flush=True)
    rc = subprocess.call(["bash", "-c", "\n".join([*setup_lines(config.cluster, code), _command(config, paths)])])
    after_srun(run, rc)
    return rc


def _nodes() -> int:
    if "SLURM_JOB_NUM_NODES" not in os.environ:
        raise UserError("cluster=allocation runs inside an sbatch job: sbatch slurm/train.sbatch …, or cluster=slurm")
    return int(os.environ["SLURM_JOB_NUM_NODES"])


def _code(run: RunDirectory, paths: JobPaths) -> Path:
    """The copy of the code that this job started with, or a new one at its first start."""
    if restarted() and paths.submitted_pickle.exists():
        return Path(json.loads((run.root / "submission.json").read_text())["code"])
    return take_snapshot(run)[0]


def _command(config: Config, paths: JobPaths) -> str:
    cpus = os.environ.get("SLURM_CPUS_PER_TASK")
    srun = [
        "srun",
        "--unbuffered",
        "--open-mode=append",
        f"--output={paths.folder / f'{paths.job_id}_%t_log.out'}",
        f"--ntasks-per-node={TASKS_PER_NODE}",
        f"--ntasks={TASKS_PER_NODE * _nodes()}",
        *([f"--cpus-per-task={cpus}"] if cpus else []),
        *srun_options(config.cluster),
    ]
    program = [sys.executable, "-u", "-m", "submitit.core._submit", str(paths.folder)]
    return f"export SUBMITIT_EXECUTOR=slurm\n{shlex.join([*srun, *program])}"

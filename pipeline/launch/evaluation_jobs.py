"""Checkpoint evaluation on Slurm: one array over weights × harness, submitted by hand or by the run itself.

Arrays of one run bear one name and are singletons: the tasks of one run side by side, the next array waits for its end.
`python -m pipeline.launch.evaluation_jobs RUN_DIR CHECKPOINT` is how the run submits one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import submitit

from pipeline.config import ClusterConfig, Config, StageConfig, UserError
from pipeline.harness.base import register
from pipeline.launch import slurm
from pipeline.launch.data import load_split
from pipeline.launch.evaluation import SUBMITTED, EvaluationJob, evaluate, pin
from pipeline.launch.gates import ensure_gates
from pipeline.launch.logs import FORMAT, quieten_others
from pipeline.launch.program import to_config
from pipeline.launch.rendezvous import restart_count
from pipeline.launch.run_directory import FencedOff, RunDirectory
from pipeline.launch.slurm import is_of_a_job
from pipeline.launch.snapshot import take_snapshot, with_absolute_paths
from pipeline.launch.squeue import WAITING, find_tasks
from pipeline.report.store import write_json
from pipeline.stages.evaluation import INCOMPLETE

TERMINATED = 128 + signal.SIGTERM
SUBMIT_S = 120.0
FOREIGN = ("MASTER_", "WANDB_SERVICE")  # of the trainer around a submission, besides what is of its job
FOREIGN_WORDS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")

log = logging.getLogger("yoke.evaluation")


class EvaluationProgram:
    """One task of an array. Warned of its end it is requeued, and goes on with the cells that lack a grade."""

    def __init__(self, config: dict[str, Any], run_dir: str, job: dict[str, Any]) -> None:
        self.config, self.run_dir, self.job = config, run_dir, job

    def __call__(self) -> None:
        signal.signal(signal.SIGTERM, _leave)  # submitit would ignore it
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        logging.basicConfig(level=logging.INFO, format=FORMAT, stream=sys.stderr)
        quieten_others()
        config, run = to_config(self.config), RunDirectory(Path(self.run_dir))
        register(config.harness.recipes)
        job = EvaluationJob.from_json(self.job)
        try:
            ensure_gates(config, run)
            coverage = evaluate(config, run, job).coverage()
        except FencedOff as error:
            log.warning("%s", error)
            raise SystemExit(1) from None
        log.info("%s, %s: %d of %d graded", job.label, "+".join(job.harnesses), coverage.graded, coverage.planned)
        if not coverage.complete:
            raise SystemExit(INCOMPLETE)

    def checkpoint(self) -> submitit.helpers.DelayedSubmission | None:
        """Called by submitit at the warning. None, which means no requeue, when all restarts are used up."""
        if restart_count() >= to_config(self.config).cluster.max_requeues:
            return None
        return submitit.helpers.DelayedSubmission(self)


def _leave(*_: object) -> None:
    raise SystemExit(TERMINATED)


# --- by hand


def on_slurm(config: Config) -> bool:
    """Whether an evaluation with these settings is submitted. A run by hand was in a job that is not this process's."""
    name = config.cluster.name
    return name == "slurm" or (name == "allocation" and "SLURM_JOB_ID" not in os.environ)


def launch(config: Config, run: RunDirectory, jobs: Sequence[EvaluationJob]) -> int:
    """`yoke evaluate cluster=slurm`: submit the array, or with dry_run show it, and say how to follow it."""
    pairs = [pair for job in jobs for pair in job.by_harness()]
    if config.dry_run:
        print(text(config, run, pairs))
        return 0
    array = submit(config, run, pairs)
    print(f"submitted array {array}: {len(jobs)} checkpoints × {len(jobs[0].harnesses)} harnesses, {run.root}")
    print(f"  follow    squeue --name {job_name(run)}")
    print(f"  results   yoke report run_dir={run.root}")
    print(f"  logs      {run.root}/jobs/{array}*_0_log.out")
    return 0


def submit(config: Config, run: RunDirectory, pairs: Sequence[EvaluationJob]) -> str:
    """One task a (weights, harness), in an array. Returns its id. Raises UserError, SlurmError as slurm.send."""
    config = with_absolute_paths(config)
    load_split(config, run, "test")  # generated tasks are made here, by one process
    executor = _executor(config, run, take_snapshot(run)[0])
    programs = [EvaluationProgram(asdict(config), str(run.root), asdict(pair)) for pair in pairs]
    array = slurm.send_all(executor, programs)[0].partition("_")[0]
    for job in _by_label(pairs):
        pin(config, run, job)
        write_json(run.evaluation(job.label) / "jobs" / SUBMITTED, {"array": array})
    return array


def _by_label(pairs: Sequence[EvaluationJob]) -> list[EvaluationJob]:
    """One job a label, in all its harnesses: a cohort reads and hashes every task."""
    jobs: dict[str, EvaluationJob] = {}
    for pair in pairs:
        known = jobs.get(pair.label)
        jobs[pair.label] = replace(pair, harnesses=(*known.harnesses, *pair.harnesses)) if known else pair
    return list(jobs.values())


def text(config: Config, run: RunDirectory, pairs: Sequence[EvaluationJob]) -> str:
    """What would be submitted. Writes nothing."""
    executor = _executor(with_absolute_paths(config), run, run.root / "code" / slurm.CODE)
    executor.parameters["map_count"] = len(pairs)
    script = executor._make_submission_file_text(executor._submitit_command_str, "plan")
    rows = "\n".join(f"  {number:>3}  {pair.weights}  {'+'.join(pair.harnesses)}" for number, pair in enumerate(pairs))
    return f"evaluation of {run.root}: {len(pairs)} array tasks\n{rows}\n\n--- sbatch script\n{script}"


def _executor(config: Config, run: RunDirectory, code: Path) -> submitit.SlurmExecutor:
    config = replace(config, cluster=evaluation_cluster(config))
    options = {"requeue": True, "dependency": "singleton"} | config.cluster.sbatch
    return slurm.make_executor(
        config, run, code, job_name=job_name(run), ntasks_per_node=1, teardown=[], additional_parameters=options
    )


def evaluation_cluster(config: Config) -> ClusterConfig:
    """The settings of evaluation jobs: one node and a GPU a replica, else the run's, with ``evaluation.cluster`` over
    them.

    Raises UserError for a key that `cluster` has not.
    """
    known = {item.name for item in fields(ClusterConfig)}
    if strange := sorted(set(config.evaluation.cluster) - known):
        raise UserError(f"evaluation.cluster has no {', '.join(strange)}; one of: {', '.join(sorted(known))}")
    gpus = 0 if config.stage.api_url else min(max(1, config.evaluation.replicas), config.cluster.gpus_per_node)
    one = replace(config.cluster, nodes=1, gpus_per_node=gpus)
    return replace(one, **config.evaluation.cluster)


def job_name(run: RunDirectory) -> str:
    """The same for all evaluation jobs of a run, and no other run's."""
    return f"yoke-eval-{run.root.name}-{hashlib.sha256(str(run.root).encode()).hexdigest()[:8]}"


# --- by the run


@dataclass(frozen=True)
class Queue:
    """The evaluation jobs of a run that are in Slurm's queue."""

    waiting: int  # array tasks that have not begun
    arrays: frozenset[str]  # ids of the arrays that have not ended


def queue(run: RunDirectory) -> Queue:
    """Raises QueueSilent when Slurm does not answer."""
    tasks = find_tasks(job_name(run))
    return Queue(sum(state in WAITING for _, state in tasks), frozenset(array for array, _ in tasks))


def submit_from_run(run: RunDirectory, name: str) -> str:
    """Submit the evaluation of the export ``name`` from within the run's own job. Returns what was said.

    In a process of its own, for a submission must not see the job around it, nor the trainer its environment changed.
    Raises RuntimeError when that fails, with its last line.
    """
    command = [sys.executable, "-m", "pipeline.launch.evaluation_jobs", str(run.root), name]
    try:
        done = subprocess.run(
            command, env=_clean_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=SUBMIT_S, check=False, start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not submitted within {SUBMIT_S:g} s") from None
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
    return done.stdout.strip()


def _clean_environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if not (is_of_a_job(name) or name.startswith(FOREIGN) or name in FOREIGN_WORDS)
    }


def main(words: Sequence[str]) -> None:
    """Submit the evaluation of one checkpoint with the settings that the run was made with."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    run, name = RunDirectory(Path(words[0])), words[1]
    config = replace(run.saved_config(), stage=StageConfig())  # of a checkpoint, whatever the first command was about
    register(config.harness.recipes)
    job = EvaluationJob(name, name, tuple(config.mix.harnesses), config.evaluation.small_tasks)
    array = submit(config, run, job.by_harness())
    print(f"evaluation of {name} submitted as array {array}")


if __name__ == "__main__":
    main(sys.argv[1:])

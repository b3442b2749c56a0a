"""Checkpoint evaluation: some weights × some harnesses, beside a training that may be going on.

It reads exports and checkpoints, and writes only below evaluation/<label>/: the cells, and in jobs/<harness>/ a place
with attempts of its own, so that of two jobs on the same cells the newer one goes on and the other one writes no more.
"""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.config import Config, UserError
from pipeline.harness.base import get_harness, harness_root
from pipeline.launch.cohort import RESERVED, pin_cohort
from pipeline.launch.data import evenly, load_split, split_size
from pipeline.launch.local import claim, living
from pipeline.launch.retention import set_apart
from pipeline.launch.run_directory import Attempt, RunDirectory, discard
from pipeline.records import RolloutRecord
from pipeline.report.measures import evaluation_metrics
from pipeline.report.store import write_json
from pipeline.stages.evaluation import Cells, evaluation_specs, read_cells, read_tries
from pipeline.stages.hosted import HostedModel, evaluated_model

PIN = "weights.json"
SUBMITTED = "submitted.json"
FINISHED = "finished.json"


@dataclass(frozen=True)
class EvaluationJob:
    """What one process evaluates: the weights ``weights``, kept under ``label``, in each of ``harnesses``."""

    label: str
    weights: str
    harnesses: tuple[str, ...]
    tasks: int = 0  # so many of the held-out tasks, evenly drawn; 0 = all, or as many as the label began with

    @classmethod
    def from_json(cls, job: Mapping[str, Any]) -> EvaluationJob:
        """What asdict made."""
        return cls(**{**job, "harnesses": tuple(job["harnesses"])})

    def by_harness(self) -> list[EvaluationJob]:
        """The same work as one job a harness."""
        return [replace(self, harnesses=(harness,)) for harness in self.harnesses]


@dataclass(frozen=True)
class EvaluationAttempt(Attempt):
    """One start of a job: an attempt in the place of its first harness, and of every other one."""

    others: tuple[Attempt, ...] = ()

    def check_fence(self) -> None:
        """Raises FencedOff when a newer job has begun with one of the harnesses."""
        super().check_fence()
        for other in self.others:
            other.check_fence()


# --- the plan


def plan(config: Config, run: RunDirectory) -> list[EvaluationJob]:
    """One job for each of the weights that ``stage.checkpoint`` names, or for the model at ``stage.api_url``.

    Raises UserError for a wrong stage.… setting.
    """
    from pipeline.stages.weights import imported, kept, select  # imports torch

    harnesses = _harnesses(config)
    if (hosted := evaluated_model(config.stage)) is not None:
        job = EvaluationJob(_hosted_label(config, hosted), hosted.name, harnesses, config.stage.tasks)
        _check_pin(run, job)
        return [job]
    names = select(config.stage.checkpoint, kept(run.checkpoints, run.models), imported(run.models))
    label = config.stage.label
    if label is not None and (len(names) > 1 or Path(label).name != label or label.startswith(".")):
        raise UserError(f"stage.label={label}: a plain name, and for one checkpoint only (here: {', '.join(names)})")
    jobs = [EvaluationJob(label or name, name, harnesses, config.stage.tasks) for name in names]
    for job in jobs:
        _check_pin(run, job)
    return jobs


def _hosted_label(config: Config, hosted: HostedModel) -> str:
    """``stage.label``, or what of the model's name can be a directory's."""
    from pipeline.stages.weights import NEWEST, update_of

    if config.stage.checkpoint != NEWEST:
        raise UserError(f"stage.checkpoint={config.stage.checkpoint} and stage.api_url={hosted.url}: give one of them")
    label = config.stage.label or re.sub(r"[^A-Za-z0-9._]+", "-", hosted.model).strip("-.")
    if not label or Path(label).name != label or label.startswith(".") or update_of(label) is not None:
        raise UserError(f"stage.label={label}: a plain name, and not one of a checkpoint's (stage.api_model needs one)")
    return label


def _harnesses(config: Config) -> tuple[str, ...]:
    harnesses = config.mix.harnesses if config.stage.harnesses is None else config.stage.harnesses
    if not harnesses or len(set(harnesses)) < len(harnesses):
        raise UserError(f"stage.harnesses={harnesses}: name each harness once, at least one")
    _check_installed(config, harnesses)
    return tuple(harnesses)


def _check_installed(config: Config, harnesses: Sequence[str]) -> None:
    for name in harnesses:
        get_harness(name).check_installed(harness_root(config.harness.home))


def _check_pin(run: RunDirectory, job: EvaluationJob) -> None:
    """An evaluation is of one set of weights. Raises UserError when its label was used for others."""
    used = pinned(run, job.label)
    if job.label in RESERVED or used not in (None, job.weights):
        raise UserError(
            f"stage.label={job.label} is of {used or 'the run itself'}, asked for are the weights {job.weights}: "
            "choose another label"
        )
    begun = size_of(run, job.label)
    if used is not None and job.tasks not in (0, begun):
        raise UserError(
            f"evaluation {job.label} began with {begun or 'all'} tasks, stage.tasks={job.tasks}: "
            "leave it out, or choose another label (stage.label=…)"
        )


def pin(config: Config, run: RunDirectory, job: EvaluationJob) -> None:
    """Keep which weights the label is of, and which cohort. Raises UserError when it is of others."""
    _check_pin(run, job)
    begun = pinned(run, job.label) is not None
    pin_cohort(config, run, job.label, job.harnesses, size_of(run, job.label) if begun else job.tasks)
    if not begun:
        small = {"tasks": job.tasks} if job.tasks else {}
        write_json(run.evaluation(job.label) / PIN, {"weights": job.weights, **small})


def pinned(run: RunDirectory, label: str) -> str | None:
    """The weights that ``label`` is an evaluation of; None while it is of none."""
    path = run.evaluation(label) / PIN
    return str(json.loads(path.read_text())["weights"]) if path.exists() else None


def size_of(run: RunDirectory, label: str) -> int:
    """How many of the held-out tasks ``label`` is an evaluation of; 0 = all."""
    path = run.evaluation(label) / PIN
    return int(json.loads(path.read_text()).get("tasks", 0)) if path.exists() else 0


def own_part(run: RunDirectory, jobs: Sequence[EvaluationJob]) -> list[EvaluationJob]:
    """What this process has to do: all, or in a task of a Slurm array its share of the (weights, harness) pairs.

    The first task writes the plan down for the others, since the run may keep other weights when they begin.
    """
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if not array:
        return list(jobs)
    agreed = _agree(run.root / "evaluation" / f".array-{array}", jobs)
    index = int(os.environ["SLURM_ARRAY_TASK_ID"]) - int(os.environ["SLURM_ARRAY_TASK_MIN"])
    return share(agreed, index, int(os.environ["SLURM_ARRAY_TASK_COUNT"]))


def share(jobs: Sequence[EvaluationJob], index: int, count: int) -> list[EvaluationJob]:
    """Every ``count``-th (weights, harness) from ``index`` on."""
    pairs = [pair for job in jobs for pair in job.by_harness()]
    return pairs[index::count]


def _agree(agreement: Path, jobs: Sequence[EvaluationJob]) -> list[EvaluationJob]:
    """The ``jobs`` of whoever asked first: a directory appears by one rename, and only once."""
    if not agreement.exists():
        draft = agreement.with_name(f"{agreement.name}-{secrets.token_hex(4)}")
        write_json(draft / "jobs.json", [asdict(job) for job in jobs])
        try:
            draft.rename(agreement)
        except OSError:
            shutil.rmtree(draft)
    found = json.loads((agreement / "jobs.json").read_text())
    return [EvaluationJob.from_json(job) for job in found]


# --- one job


def evaluate(config: Config, run: RunDirectory, job: EvaluationJob) -> Cells:
    """Try every cell of the job that lacks a grade. Returns the cells as they are then.

    Raises UserError when the evaluation began with another cohort, FencedOff when another job took the same cells over,
    CheckpointError when the weights are gone.
    """
    from pipeline.stages.weights import model_dir

    pin(config, run, job)
    cells = job_cells(config, run, job)
    if not cells.done:
        attempt = _claim(run, job)
        hosted = evaluated_model(config.stage)
        if hosted is not None and job.weights == hosted.name:
            _work_through_hosted(_own_seed(config, job), attempt, hosted, cells)
        else:
            model = model_dir(config, run.checkpoints, run.models, job.weights)
            _work_through(_own_seed(config, job), attempt, model, cells)
        attempt.check_fence()
    _finish(run, job, cells)
    return cells


def job_cells(config: Config, run: RunDirectory, job: EvaluationJob) -> Cells:
    """The cells of a job as they stand on disk."""
    chosen = evenly(load_split(config, run, "test"), size_of(run, job.label))
    specs = evaluation_specs([task.ref for task in chosen], job.harnesses, config.evaluation.rollouts_per_task)
    return Cells(run.evaluation(job.label), specs, config.evaluation.retries)


def place(run: RunDirectory, label: str, harness: str) -> RunDirectory:
    """Where the jobs of one harness claim their attempts; not in the run's attempts, which would end the training."""
    return RunDirectory(run.evaluation(label) / "jobs" / harness)


def refuse_living(run: RunDirectory, jobs: Sequence[EvaluationJob]) -> None:
    """Raises UserError when a process of this machine is at the same cells."""
    for part in (part for job in jobs for part in job.by_harness()):
        if found := living(place(run, part.label, part.harnesses[0])):
            raise UserError(f"process {found[1]} is evaluating {part.label} in {part.harnesses[0]}: wait for it")


def _claim(run: RunDirectory, job: EvaluationJob) -> EvaluationAttempt:
    attempts = [place(run, job.label, harness).new_attempt() for harness in job.harnesses]
    for attempt in attempts:
        attempt.run.sweep_scratch(attempt.number)
        claim(attempt, os.getpid())
    return EvaluationAttempt(attempts[0].run, attempts[0].number, tuple(attempts[1:]))


def _own_seed(config: Config, job: EvaluationJob) -> Config:
    """Evaluations of the same weights under two labels must not sample the same numbers."""
    seed = random.Random(f"{config.seed}/{job.label}/{'/'.join(job.harnesses)}").getrandbits(31)
    return replace(config, seed=seed)


def _work_through(config: Config, attempt: Attempt, model: Path, cells: Cells) -> None:
    from pipeline.launch.standalone import work_through

    work_through(config, attempt, model, cells)


def _work_through_hosted(config: Config, attempt: Attempt, hosted: HostedModel, cells: Cells) -> None:
    from pipeline.launch.standalone import work_through_hosted

    work_through_hosted(config, attempt, hosted, cells)


def _finish(run: RunDirectory, job: EvaluationJob, cells: Cells) -> None:
    """Leave word that a job of these (weights, harness) came to its end, and how far it got."""
    for harness, coverage in cells.coverage_by_harness().items():
        record = {"graded": coverage.graded, "planned": coverage.planned, "time": time.time()}
        write_json(place(run, job.label, harness).root / FINISHED, record)


# --- what came of it


def labels(run: RunDirectory) -> list[str]:
    """The evaluations of checkpoints so far, by update and name."""
    from pipeline.stages.weights import update_of

    root = run.root / "evaluation"
    found = [path.name for path in root.iterdir() if (path / PIN).exists()] if root.is_dir() else []
    return sorted(found, key=lambda label: (update_of(pinned(run, label) or "") or 0, label))


def tries(run: RunDirectory, label: str) -> list[RolloutRecord]:
    """Every try of every rollout of an evaluation, without its rows."""
    return read_tries(run.evaluation(label))


def records(run: RunDirectory, label: str) -> list[RolloutRecord]:
    """Every rollout of an evaluation, graded or not."""
    return read_cells(run.evaluation(label))


def planned_of(config: Config, run: RunDirectory, label: str, found: Sequence[RolloutRecord]) -> dict[str, int]:
    """Rollouts by harness that an evaluation shall hold: of the harnesses that have a job or a rollout."""
    begun = run.evaluation(label) / "jobs"
    names = {path.name for path in begun.iterdir() if path.is_dir()} if begun.is_dir() else set()
    whole, small = split_size(config, run, "test"), size_of(run, label)
    each = (min(small, whole) or whole) * config.evaluation.rollouts_per_task
    return dict.fromkeys(sorted(names | {record.harness for record in found}), each)


def late_results(
    config: Config, run: RunDirectory, metrics: Sequence[Mapping[str, Any]]
) -> list[tuple[int, dict[str, float]]]:
    """(update, metrics) of checkpoints' evaluations whose jobs have ended and of which ``metrics`` knows less."""
    from pipeline.stages.weights import update_of

    known = {entry["update"]: float(entry.get("eval/coverage", 0.0)) for entry in metrics}
    late = []
    for label in labels(run):
        update = update_of(label)
        if update is None or not _ended(run, label, config.mix.harnesses):
            continue  # a label of the user's own is no point of the curve
        if known.get(update, 0.0) >= 1.0:
            continue
        found = [record for record in records(run, label) if record.harness in config.mix.harnesses]
        planned = sum(planned_of(config, run, label, found)[harness] for harness in config.mix.harnesses)
        values = evaluation_metrics(found, planned)
        if values.get("eval/coverage", 0.0) > known.get(update, 0.0):
            late.append((update, values))
    return late


def _ended(run: RunDirectory, label: str, harnesses: Sequence[str]) -> bool:
    return all((place(run, label, harness).root / FINISHED).exists() for harness in harnesses)


# --- exports


def exports_needed(run: RunDirectory, arrays: Collection[str]) -> set[str]:
    """The weights that jobs of these Slurm arrays read."""
    found = (run.root / "evaluation").glob(f"*/jobs/{SUBMITTED}")
    waiting = [path.parents[1].name for path in found if json.loads(path.read_text())["array"] in arrays]
    return {pinned(run, label) or label for label in waiting}


def not_evaluated(run: RunDirectory, harnesses: Sequence[str]) -> set[str]:
    """The exports that were not evaluated in each of ``harnesses`` yet."""
    from pipeline.stages.weights import exported

    return {name for name in exported(run.models) if not _ended(run, name, harnesses)}


def prune_exports(run: RunDirectory, keep: int, needed: Collection[str], keep_every: int = 0) -> list[str]:
    """Delete all but the newest ``keep`` exports (0: none), those ``needed``, and those of each ``keep_every``-th
    update (0: none). Returns the names of the deleted.
    """
    from pipeline.stages.weights import exported

    surplus = exported(run.models)[:-keep] if keep else []
    gone = set_apart(surplus, needed, keep_every)
    for name in gone:
        discard(run.models / name)
    return gone

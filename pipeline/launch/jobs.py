"""What each word after `yoke` does. A job takes the composed configuration and returns the exit code."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.config import Config, UserError
from pipeline.harness.base import register
from pipeline.launch import allocation, preflight, preflight_table, slurm
from pipeline.launch.data import load_split, load_splits
from pipeline.launch.draws import draw_until, open_schedule
from pipeline.launch.gates import SOUND, check_all, ensure_gates
from pipeline.launch.local import RunFailed, RunStopped, claim, follow, living, start_over
from pipeline.launch.plan import plan
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.slurm import queued
from pipeline.launch.snapshot import with_absolute_paths
from pipeline.launch.sweep_points import is_sweep
from pipeline.records import Outcome, RolloutRecord
from pipeline.report.store import write_group, write_json
from pipeline.sandbox.base import make_sandbox
from pipeline.stages import advantage as advantage_stage
from pipeline.stages.evaluation import INCOMPLETE, Cells, evaluation_specs, is_graded, read_cell
from pipeline.stages.rollout import graded_again
from pipeline.stages.verification import kept_layer
from pipeline.stages.verification import verify as verify_workspace
from pipeline.tasks.harbor import load_task

STOPPED = 130  # exit code, as after Ctrl-C
REPORT_FORMS = {"--json": "json", "--md": "md"}


def train(config: Config) -> int:
    """The whole loop, from where the run directory says it stands: here, or in a Slurm job that this submits."""
    config = with_absolute_paths(config)
    if config.dry_run:
        return _dry_run(config)
    run = RunDirectory(Path(config.run_dir))
    if job := queued(run):
        say(f"{run.root} is in job {job[0]} already ({job[1].lower()}): yoke status {run.root} --watch")
        return 0
    run = _open(config, joins=config.cluster.name == "local", trains=True)
    if run.done and covered(config, run):
        say(f"{run.root} is done; fresh=true starts over")
        return _report(config, run)
    return LAUNCHERS[config.cluster.name](config, run)


def submit(config: Config) -> str:
    """The same for one point of a sweep: submits its run without a word. Returns the job id."""
    return slurm.submit(config, _open(config, quiet=True, trains=True))


def _dry_run(config: Config) -> int:
    run = RunDirectory(Path(config.run_dir))
    preflight.check_settings(config, port_is_ours=True)
    preflight_table.refuse_at_start(config, run)
    if config.tasks.kind != "generated":
        preflight.check_tasks_readable(config, run)
    say(slurm.text(config, run) if config.cluster.name == "slurm" else plan(config, run))
    return 0


def _train_here(config: Config, run: RunDirectory) -> int:
    try:
        follow(config, run)
    except RunFailed as error:
        print(f"yoke: {error}", file=sys.stderr)
        return 1
    except RunStopped as stopped:
        say(str(stopped))
        return STOPPED
    if config.evaluation.every:
        _evaluate_exports(config, run)
    return _report(config, run)


def _evaluate_exports(config: Config, run: RunDirectory) -> None:
    """Without Slurm there is no other node: the checkpoints that training exported take their turns after it."""
    from pipeline.launch import evaluation
    from pipeline.stages.weights import exported

    for name in exported(run.models):
        job = evaluation.EvaluationJob(name, name, tuple(config.mix.harnesses), config.evaluation.small_tasks)
        _tell_evaluation(name, evaluation.evaluate(config, run, job))


LAUNCHERS = {"local": _train_here, "slurm": slurm.launch, "allocation": allocation.launch}


def check(config: Config) -> int:
    """Every setting and every task, without starting a run."""
    say(f"sandbox: {preflight.check_settings(config)}")
    preflight_table.refuse_at_start(config, RunDirectory(Path(config.run_dir)))
    with tempfile.TemporaryDirectory() as scratch:
        run = RunDirectory(Path(scratch))
        say(f"tasks: {preflight.check_tasks_readable(config, run)}")
        say(f"settings are fine; {check_all(config, run)} tasks are: {SOUND}")
    return 0


def evaluate(config: Config) -> int:
    """Held-out tasks × harnesses with checkpoints of the run, here or in Slurm jobs that this submits."""
    from pipeline.launch import evaluation, evaluation_jobs

    run = RunDirectory(Path(config.run_dir).absolute()) if config.dry_run else _open(config, beside=True)
    jobs = evaluation.plan(config, run)
    if config.dry_run or evaluation_jobs.on_slurm(config):
        return evaluation_jobs.launch(config, run, jobs)
    _greet_hosted(config)
    if config.cluster.name == "local":
        evaluation.refuse_living(run, jobs)
    own = evaluation.own_part(run, jobs)
    for job in own:  # in all harnesses, so that every task of an array writes the same down
        evaluation.pin(config, run, replace(job, harnesses=jobs[0].harnesses))
    told = [_tell_evaluation(job.label, evaluation.evaluate(config, run, job)) for job in own]
    return max(told, default=0)


def _greet_hosted(config: Config) -> None:
    """Before a label is taken for it. Raises UserError when it does not answer."""
    from pipeline.stages.hosted import evaluated_model, greet

    if (hosted := evaluated_model(config.stage)) is not None:
        asyncio.run(greet(hosted, {"temperature": config.harness.sampling.temperature}))


def rollout(config: Config) -> int:
    """The next groups of the schedule, with the newest weights; their workspaces are kept for `yoke verify`."""
    from pipeline.stages.update import read_flow

    run = _open(config)
    _, model_dir = _newest_weights(config, run)
    train_tasks, _ = load_splits(config, run)
    flow = read_flow(run.checkpoints)
    schedule = open_schedule(train_tasks, config, run, flow.next_index)
    draw_until(schedule, flow.difficulty, len(flow.ended) + config.stage.groups, run)
    coming = (schedule.group(index) for index in itertools.count())
    specs = list(itertools.islice((s for s in coming if s.group_id not in flow.ended), config.stage.groups))
    cells = Cells(_stage(run, "rollout"), specs, config.harness.retries)
    _work_through(config, run, model_dir, cells, _stage(run, "workspaces"))
    say(f"{len(specs)} groups in {_stage(run, 'rollout')}; next: yoke verify, then yoke advantage")
    return 0


def verify(config: Config) -> int:
    """Score the kept workspaces again."""
    run = _open(config)
    sandbox = make_sandbox(config.sandbox)
    for path in _groups(run, "rollout"):
        records = [asyncio.run(_verify_again(run, record, path, config, sandbox)) for record in read_cell(path)]
        write_group(_stage(run, "verification") / path.name, records)
        say(f"{path.stem}: {sum(r.verdict.correctness or 0 for r in records):g} of {len(records)} solved")
    return 0


async def _verify_again(run: RunDirectory, record: RolloutRecord, path: Path, config: Config, sandbox) -> RolloutRecord:  # type: ignore[no-untyped-def]
    if record.outcome is Outcome.INFRASTRUCTURE:
        return record
    workspace = _stage(run, "workspaces") / path.stem / str(record.index)
    if not workspace.is_dir():
        raise UserError(f"{workspace} is missing: run `yoke rollout` again")
    task = load_task(_task_path(run, config, record.task_id))
    scratch = _stage(run, "scratch")
    scratch.mkdir(parents=True, exist_ok=True)
    layer = kept_layer(workspace)
    verdict = await verify_workspace(task, workspace, sandbox, scratch, layer=layer if layer.is_dir() else None)
    return graded_again(record, verdict)


def _task_path(run: RunDirectory, config: Config, task_id: str) -> Path:
    paths = {ref.task_id: ref.path for refs in load_splits(config, run) for ref in refs}
    if task_id not in paths:
        raise UserError(f"task {task_id} of the kept rollouts is not among the tasks of these settings")
    return paths[task_id]


def advantage(config: Config) -> int:
    """Rewards and advantages of the groups of `yoke verify`, or else of every closed group of the run."""
    run = _open(config)
    reward = advantage_stage.configured_reward(config)
    sources = (
        _groups(run, "verification", optional=True) or _groups(run, "rollout", optional=True) or _closed_groups(run)
    )
    if not sources:
        raise UserError(f"{run.root} holds no closed group: `yoke rollout` or `yoke train` comes first")
    for path in sources:
        records = advantage_stage.score(read_cell(path), reward)
        values = advantage_stage.advantages(records, config.algorithm.normalize_std)
        marked = [replace(r, info=r.info | {"advantage": value}) for r, value in zip(records, values, strict=True)]
        write_group(_stage(run, "advantage") / path.name, marked)
        say(f"{path.stem}: advantages {[None if value is None else round(value, 3) for value in values]}")
        for why in sorted(set(advantage_stage.reward_failures(records))):
            say(f"{path.stem}: reward.fn failed, such rollouts are ungraded: {why}")
    return 0


def update(config: Config) -> int:
    """One update from the groups of `yoke advantage`, on the newest checkpoint; writes the next checkpoint."""
    from pipeline.stages.update import update_once

    run = _open(config)
    groups = [
        group
        for path in _groups(run, "advantage")
        if (
            group := advantage_stage.to_train_group(
                read_cell(path), config.algorithm.group_size, config.algorithm.normalize_std
            )
        )
    ]
    if not groups:
        raise UserError(f"no group in {_stage(run, 'advantage')} has contrast: there is nothing to learn from")
    metrics, place = update_once(config, run.checkpoints, groups)
    write_json(_stage(run, "update") / f"{place.name}.json", metrics)
    say(f"updated on {len(groups)} groups; checkpoint {place}")
    return 0


def collect(config: Config) -> int:
    """Record a teacher through the real harnesses and the proxy."""
    from pipeline.stages.collect import run_collect

    return run_collect(replace(config, fresh=config.fresh and not allocation.restarted()))


def sft(config: Config) -> int:
    """Supervised learning on what `yoke collect` recorded."""
    from pipeline.stages.sft import run_sft

    config = replace(config, fresh=config.fresh and not allocation.restarted())
    return run_sft(with_absolute_paths(config))


def warm_start(config: Config) -> int:
    """The quick start's model, from nothing."""
    from pipeline.stages.warm_start import run_warm_start

    return run_warm_start(config)


def report(config: Config, words: Sequence[str] = ()) -> int:
    """The report again, of a run (with the settings that it was made with), of several side by side, or of a sweep."""
    flags = [word for word in words if word.startswith("-")]
    places = [word for word in words if word not in flags] or [config.run_dir]
    if strange := [flag for flag in flags if flag not in REPORT_FORMS] or flags[1:]:
        raise UserError(f"yoke report RUN… [--json | --md]: what is {strange[0]}?")
    runs = [RunDirectory(Path(place).absolute()) for place in dict.fromkeys(places)]
    form = REPORT_FORMS[flags[0]] if flags else ""
    if any(is_sweep(run.root) for run in runs):
        if len(runs) > 1:
            raise UserError("yoke report takes a sweep by itself, or several runs")
        return _report_sweep(runs[0], form)
    if len(runs) > 1:
        return _report_several(runs, form)
    made_with = runs[0].saved_config()
    register(made_with.harness.recipes)
    return _report(made_with, runs[0], form)


# --- parts


def say(text: str) -> None:
    """One plain line to the person at the terminal."""
    print(text, flush=True)


def _report(config: Config, run: RunDirectory, form: str = "") -> int:
    from pipeline.launch.reporting import report_run  # matplotlib and SciPy take seconds to import

    return report_run(config, run, form)


def _report_several(runs: Sequence[RunDirectory], form: str) -> int:
    from pipeline.launch.reporting import report_runs

    return report_runs(runs, form)


def _report_sweep(sweep: RunDirectory, form: str) -> int:
    from pipeline.launch.sweep_report import report_sweep

    return report_sweep(sweep.root, form)


def _open(
    config: Config, joins: bool = False, beside: bool = False, quiet: bool = False, trains: bool = False
) -> RunDirectory:
    """Check every setting and task, then make or reopen the run directory.

    A living run is left alone, but for training, which ``joins`` it, and for what goes on ``beside`` it. ``trains``:
    the settings must go together too, in whatever only training needs.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    config = with_absolute_paths(config)
    run = RunDirectory(Path(config.run_dir))
    running = living(run)
    beside = beside and not config.fresh
    if running and not joins and not beside:
        raise UserError(f"{run.root} is in use by a running job (attempt {running[0].number}): wait for it or stop it")
    if not beside and (job := queued(run)):
        raise UserError(
            f"{run.root} is in use by job {job[0]} ({job[1].lower()}): wait for it, or yoke stop {run.root}"
        )
    sandbox = preflight.check_settings(config, port_is_ours=bool(running) and joins)
    if trains:
        preflight_table.refuse_at_start(config, run)
    if not quiet:
        say(f"sandbox: {sandbox}")
    if config.tasks.kind != "generated":
        tasks = preflight.check_tasks_readable(config, run)
        if not quiet:
            say(f"tasks: {tasks}")
    if config.fresh and not allocation.restarted():
        start_over(run)
    run.save_config(config)
    if config.cluster.name == "local" and not running and (count := ensure_gates(config, run)) is not None:
        say(f"{count} tasks checked: {SOUND}")
    return run


def covered(config: Config, run: RunDirectory) -> bool:
    """Whether the closing evaluation is whole; if not, training again tries its ungraded rollouts."""
    if not config.evaluation.after:
        return True
    tasks = [task.ref for task in load_split(config, run, "test")]
    specs = evaluation_specs(tasks, config.mix.harnesses, config.evaluation.rollouts_per_task)
    return Cells(run.evaluation("after"), specs, 0).coverage().complete


def _newest_weights(config: Config, run: RunDirectory) -> tuple[str, Path]:
    """(label, model directory) of the newest checkpoint, exported if need be; the base model before the first one."""
    from pipeline.stages.update import export_newest

    return export_newest(config, run.checkpoints, run.root / "models")


def _work_through(
    config: Config, run: RunDirectory, model_dir: Path, cells: Cells, snapshots: Path | None = None
) -> None:
    from pipeline.launch.standalone import work_through

    if cells.done:
        return
    attempt = run.new_attempt()
    claim(attempt, os.getpid())
    work_through(config, attempt, model_dir, cells, snapshots)


def _tell_evaluation(label: str, cells: Cells) -> int:
    records = [record for record in cells.records() if is_graded(record)]
    coverage = cells.coverage()
    solved = sum(record.verdict.correctness or 0.0 for record in records)
    say(f"evaluation {label}: pass@1 {solved / max(1, len(records)):.1%} of {coverage.graded} graded rollouts")
    if coverage.complete:
        return 0
    say(
        f"provisional: only {coverage.graded} of {coverage.planned} rollouts are graded; "
        "the same command tries the rest again"
    )
    return INCOMPLETE


def _stage(run: RunDirectory, name: str) -> Path:
    return run.root / "stages" / name


def _groups(run: RunDirectory, stage: str, optional: bool = False) -> Sequence[Path]:
    found = sorted(_stage(run, stage).glob("*.parquet"))
    if not found and not optional:
        raise UserError(f"{_stage(run, stage)} holds no group: run `yoke {stage}` first")
    return found


def _closed_groups(run: RunDirectory) -> Sequence[Path]:
    """Closed groups of every attempt; the newest attempt's file of a group counts."""
    found: dict[str, Path] = {}
    for number in run.attempt_numbers():
        found |= {path.name: path for path in run.attempt(number).groups.glob("*.parquet")}
    return [found[name] for name in sorted(found)]

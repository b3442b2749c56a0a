"""`yoke wandb`: a run's W&B run made again from its directory, and the workspace that shows runs of Yoke."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from pipeline.config import Config, LoggingConfig, UserError
from pipeline.launch.evaluation import labels, records
from pipeline.launch.reporting import may_be_alive
from pipeline.launch.run_directory import RunDirectory
from pipeline.report.metrics import read_metrics
from pipeline.report.wandb_log import STEP, WandbLog, check_wandb, offline_runs
from pipeline.report.wandb_panels import definition, workspace

USAGE = "yoke wandb again RUN…, or yoke wandb workspace ENTITY/PROJECT [mix=…], or yoke wandb workspace --json [mix=…]"


def run(config: Config, words: Sequence[str]) -> int:
    """Raises UserError for wrong words, or when a run has no metrics or is alive."""
    what, *rest = words or [""]
    action = ACTIONS.get(what)
    if action is None or not rest:
        raise UserError(USAGE)
    return action(config, rest)


def _again(config: Config, words: Sequence[str]) -> int:
    runs = [RunDirectory(Path(word).absolute()) for word in words]
    for found in runs:
        _check(found)
    for found in runs:
        again(found)
        print(f"{found.root}: wandb sync {' '.join(map(str, offline_runs(found.root)))}")
    return 0


def _check(run: RunDirectory) -> None:
    if not run.is_ours():
        raise UserError(f"there is no run in {run.root}")
    if may_be_alive(run):
        raise UserError(f"{run.root} is queued or running, and logs to W&B itself: wait for its end")
    if not read_metrics(run.root):
        raise UserError(f"{run.root} has no metrics yet")
    check_wandb(LoggingConfig(wandb="offline"), run.root)


def again(run: RunDirectory) -> None:
    """One offline W&B run of all that the run directory holds, whatever ``logging.wandb`` was."""
    config = run.saved_config()
    metrics = read_metrics(run.root)
    with_wandb = replace(config.logging, wandb="offline")
    log = WandbLog(run.root, with_wandb, asdict(config), lambda: metrics)
    for label, update in _evaluated(run, max(entry[STEP] for entry in metrics)):
        log.rollouts(update, label, partial(records, run, label))
    log.close()


def _evaluated(run: RunDirectory, updates: int) -> list[tuple[str, int]]:
    """(label, update) of every evaluation that has rollouts and is of this run's weights at a known update."""
    from pipeline.stages.weights import update_of

    known = [("before", 0), ("after", updates), *((label, update_of(label)) for label in labels(run))]
    return [(label, update) for label, update in known if update is not None and run.evaluation(label).is_dir()]


def _workspace(config: Config, words: Sequence[str]) -> int:
    harnesses = config.mix.harnesses
    if words == ["--json"]:
        print(json.dumps(definition(harnesses), indent=1))
        return 0
    entity, slash, project = words[0].partition("/")
    if len(words) != 1 or not (entity and slash and project) or "/" in project:
        raise UserError(f"{' '.join(words)}: {USAGE}")
    made = workspace(harnesses, entity, project)
    check_wandb(LoggingConfig(wandb="online"), Path(config.run_dir))
    try:
        made.save()
    except Exception as error:  # the package and W&B's client raise many kinds
        raise RuntimeError(f"W&B did not take the workspace: {error}") from error
    return 0


ACTIONS: dict[str, Callable[[Config, Sequence[str]], int]] = {"again": _again, "workspace": _workspace}

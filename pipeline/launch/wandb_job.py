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
from pipeline.report.wandb_log import FOLDER, STEP, TABLES, WandbLog, check_wandb, new_id, offline_runs
from pipeline.report.wandb_panels import definition, workspace

USAGE = "yoke wandb again RUN…, or yoke wandb workspace ENTITY/PROJECT [mix=…], or yoke wandb workspace --json [mix=…]"

MAKE_S = 600.0  # that W&B may take to make a run again


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
        print(f"{found.root}: wandb sync {' '.join(map(str, again(found)))}")
    return 0


def _check(run: RunDirectory) -> None:
    if not run.is_ours():
        raise UserError(f"there is no run in {run.root}")
    if may_be_alive(run):
        raise UserError(f"{run.root} is queued or running, and logs to W&B itself: wait for its end")
    if not read_metrics(run.root):
        raise UserError(f"{run.root} has no metrics yet")
    check_wandb(LoggingConfig(wandb="offline"), run.root)


def again(run: RunDirectory) -> list[Path]:
    """A W&B run, offline and with an id of its own, of all that the run directory holds.

    Returns its directory. Raises RuntimeError when W&B did not make it.
    """
    config = run.saved_config()
    metrics = read_metrics(run.root)
    identity = new_id()
    log = WandbLog(
        run.root, replace(config.logging, wandb="offline"), asdict(config), lambda: metrics, identity=identity
    )
    for label, update in _evaluated(run, max(entry[STEP] for entry in metrics)):
        log.rollouts(update, label, partial(records, run, label))
    log.close(MAKE_S)
    if not (made := offline_runs(run.root, identity)):
        raise RuntimeError(f"W&B made no run in {run.root / FOLDER}")
    return made


def _evaluated(run: RunDirectory, updates: int) -> list[tuple[str, int]]:
    """(label, update) of every evaluation of this run's weights at a known update that W&B has no table of."""
    from pipeline.stages.weights import update_of

    known = [("before", 0), ("after", updates), *((label, update_of(label)) for label in labels(run))]
    tables = run.root / FOLDER / TABLES
    missing = [(label, update) for label, update in known if not (tables / f"{label}.json").exists()]
    return [(label, update) for label, update in missing if update is not None and run.evaluation(label).is_dir()]


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

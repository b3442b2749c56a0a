"""Everything that can be known to go wrong is found here, before a process is started or a file written."""

from __future__ import annotations

import shutil
from pathlib import Path

from pipeline.config import Config, UserError
from pipeline.engine.server import reserve_port
from pipeline.harness.base import DEFAULT_ROOT, get_harness
from pipeline.harness.install import installed
from pipeline.launch.data import load_split
from pipeline.launch.run_directory import RunDirectory
from pipeline.sandbox.base import make_sandbox
from pipeline.stages.advantage import load_reward

ROOM_GB = 1.0


def check_settings(config: Config) -> None:
    """Raises UserError, naming the setting and what to do, for the first thing that cannot work."""
    _check_numbers(config)
    _check_model(config)
    _check_harnesses(config)
    _check_place(Path(config.run_dir))
    reserve_port(config.engine.port).close()
    load_reward(config.reward.fn, config.reward.malformed_is_call)
    make_sandbox(config.sandbox)


def _check_numbers(config: Config) -> None:
    algorithm = config.algorithm
    if algorithm.group_size < 2:
        raise UserError(
            f"algorithm.group_size={algorithm.group_size}: a group needs at least 2 rollouts to be compared"
        )
    if algorithm.group_size > algorithm.max_outstanding_rollouts:
        raise UserError(
            f"algorithm.group_size={algorithm.group_size} is larger than "
            f"algorithm.max_outstanding_rollouts={algorithm.max_outstanding_rollouts}: no group could ever start"
        )
    needed = algorithm.groups_per_update * algorithm.group_size
    if needed > algorithm.max_outstanding_rollouts:
        raise UserError(
            f"an update needs {algorithm.groups_per_update} groups of {algorithm.group_size} = {needed} rollouts, but "
            f"algorithm.max_outstanding_rollouts={algorithm.max_outstanding_rollouts}: raise it or lower the groups"
        )
    for name, value in {
        "concurrency": config.concurrency,
        "algorithm.groups_per_update": algorithm.groups_per_update,
        "algorithm.updates": algorithm.updates,
        "algorithm.minibatches": algorithm.minibatches,
        "algorithm.max_staleness": algorithm.max_staleness,
        "engine.shards": config.engine.shards,
        "training.checkpoint_every": config.training.checkpoint_every,
    }.items():
        if value < 1:
            raise UserError(f"{name}={value} must be at least 1")


def _check_model(config: Config) -> None:
    path = Path(config.model.path)
    if (path.is_absolute() or config.model.path.startswith(".")) and not (path / "config.json").is_file():
        raise UserError(f"model.path={config.model.path}: no such checkpoint directory (config.json is missing there)")


def _check_harnesses(config: Config) -> None:
    if not config.mix.harnesses:
        raise UserError("mix.harnesses is empty: name at least one harness")
    home = Path(config.harness.home or DEFAULT_ROOT).expanduser()
    for name in config.mix.harnesses:
        recipe = get_harness(name)
        if not installed(name, home):
            raise UserError(
                f"harness {name} {recipe.version} is not installed in {home}: python -m pipeline.harness.install {name}"
            )


def _check_place(run_dir: Path) -> None:
    existing = next(parent for parent in [run_dir, *run_dir.absolute().parents] if parent.exists())
    free_gb = shutil.disk_usage(existing).free / 1e9
    if free_gb < ROOM_GB:
        raise UserError(f"run_dir={run_dir}: only {free_gb:.2f} GB free, a run needs at least {ROOM_GB:g} GB")


def check_tasks_readable(config: Config, run: RunDirectory) -> None:
    """Raises UserError for a task directory that is not in Harbor's format."""
    for split in ("train", "test"):
        load_split(config, run, split)

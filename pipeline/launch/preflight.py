"""Each setting by itself: what cannot work is found here, before a process is started or a file written."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from pipeline.config import (
    ClusterConfig,
    Config,
    UserError,
    check_algorithm,
    check_curriculum,
    check_replicas,
    check_training,
)
from pipeline.engine.device import transfer_kind
from pipeline.engine.server import reserve_port
from pipeline.harness.base import HarnessRecipe, get_harness, harness_root
from pipeline.hub import cached_file, split
from pipeline.launch.data import load_split
from pipeline.launch.evaluation_jobs import evaluation_cluster
from pipeline.launch.gates import inspect_files
from pipeline.launch.preflight_machine import ROOM_GB, free_gb
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.slurm import SET_BY_US
from pipeline.launch.snapshot import SOURCE
from pipeline.report.wandb_log import check_wandb
from pipeline.sandbox.base import TASK, choose_sandbox
from pipeline.sandbox.builds import build_missing, find_build
from pipeline.sandbox.images import fetch_image
from pipeline.stages.advantage import configured_reward
from pipeline.stages.integrity import check_gates
from pipeline.stages.schedule import weighted_cycle
from pipeline.tasks.harbor import HarborTask
from pipeline.tasks.sets import KINDS, describe


def check_settings(config: Config, port_is_ours: bool = False) -> str:
    """Returns which sandbox agents will run in, and why.

    Raises UserError, naming the setting and what to do, for the first thing that cannot work.
    ``port_is_ours``: the run is going on, so its own engine holds the port.
    """
    _check_numbers(config)
    _check_names(config)
    check_algorithm(config.algorithm)
    check_training(config.training)
    check_curriculum(config.curriculum)
    check_gates(config.tasks.gates)
    _check_model(config)
    _check_harnesses(config)
    _check_place(Path(config.run_dir))
    check_wandb(config.logging, Path(config.run_dir))
    _check_cluster(config.cluster)
    evaluation_cluster(config)
    check_replicas(config)
    configured_reward(config)
    transfer_kind(config.engine.weight_transfer)
    if config.cluster.name == "slurm":  # ports and sandboxes are those of its nodes
        if not config.dry_run:
            fetch_image(config.sandbox)  # here, where a network may be
        return f"{config.sandbox.kind}, tried on the nodes at the job's start"
    if not port_is_ours:
        reserve_port(config.engine.port).close()
    return choose_sandbox(config.sandbox)[1]


def _check_cluster(cluster: ClusterConfig) -> None:
    if cluster.name == "local" and cluster.nodes > 1:
        raise UserError(f"cluster.nodes={cluster.nodes} with cluster=local: more than this machine needs cluster=slurm")
    if cluster.name == "local":
        return
    if not 0 < cluster.signal_s < 60 * cluster.timeout_min:
        raise UserError(
            f"cluster.signal_s={cluster.signal_s}: the warning must come within "
            f"cluster.timeout_min={cluster.timeout_min} minutes"
        )
    for name, value, least in (
        ("max_requeues", cluster.max_requeues, 0),
        ("gpus_per_node", cluster.gpus_per_node, 0),
        ("cpus_per_task", cluster.cpus_per_task, 1),
        ("mem_gb", cluster.mem_gb, 1),
    ):
        if value is not None and value < least:
            raise UserError(f"cluster.{name}={value} must " + (f"be at least {least}" if least else "not be negative"))
    for option in sorted({name.replace("_", "-") for name in cluster.sbatch} & set(SET_BY_US)):
        instead = SET_BY_US[option]
        raise UserError(f"cluster.sbatch.{option}: " + (f"set {instead} instead" if instead else "Yoke sets it"))


def _check_numbers(config: Config) -> None:
    algorithm = config.algorithm
    if algorithm.group_size < 2:
        raise UserError(
            f"algorithm.group_size={algorithm.group_size}: a group needs at least 2 rollouts to be compared"
        )
    for name, value in {
        "concurrency": config.concurrency,
        "algorithm.groups_per_update": algorithm.groups_per_update,
        "training.updates": config.training.updates,
        "algorithm.minibatches": algorithm.minibatches,
        "algorithm.max_staleness": algorithm.max_staleness,
        "engine.shards": config.engine.shards,
        "training.checkpoint_every": config.training.checkpoint_every,
        "cluster.max_attempts": config.cluster.max_attempts,
        "cluster.nodes": config.cluster.nodes,
        "evaluation.rollouts_per_task": config.evaluation.rollouts_per_task,
    }.items():
        if value < 1:
            raise UserError(f"{name}={value} must be at least 1")
    if config.storage.quota_gb is not None and config.storage.quota_gb <= 0:
        raise UserError(f"storage.quota_gb={config.storage.quota_gb:g} must be above 0, or null")
    for name, value in {
        "storage.rollouts": config.storage.rollouts or 0,
        "harness.retries": config.harness.retries,
        "evaluation.retries": config.evaluation.retries,
        "evaluation.every": config.evaluation.every,
        "evaluation.replicas": config.evaluation.replicas,
        "evaluation.small_tasks": config.evaluation.small_tasks,
        "stage.tasks": config.stage.tasks,
        "evaluation.keep_exports": config.evaluation.keep_exports,
        "evaluation.max_jobs": config.evaluation.max_jobs,
        "algorithm.max_rerolls": algorithm.max_rerolls,
        "mix.set_aside_after": config.mix.set_aside_after,
    }.items():
        if value < 0:
            raise UserError(f"{name}={value} must not be negative")


def _check_names(config: Config) -> None:
    """Words that only a rank would stumble over, minutes later."""
    known: dict[str, tuple[object, Collection[object]]] = {
        "cluster.name": (config.cluster.name, ("local", "slurm", "allocation")),
        "tasks.kind": (config.tasks.kind, KINDS),
        "model.dtype": (config.model.dtype, ("float32", "bfloat16", "float16")),
    }
    for name, (value, choices) in known.items():
        if value not in choices:
            raise UserError(f"{name}={value} is unknown; one of: {', '.join(map(str, choices))}")
    if config.tasks.kind == "generated" and min(config.tasks.train_size, config.tasks.test_size) < 1:
        raise UserError("tasks.train_size and tasks.test_size must be at least 1")


def _check_model(config: Config) -> None:
    path = Path(config.model.path).expanduser()
    looks_local = path.is_absolute() or config.model.path.startswith((".", "~")) or path.parts[1:2] == ()
    if not (path / "config.json").is_file() and (looks_local or not cached_file(config.model.path, "config.json")):
        name, revision = split(config.model.path)
        wanted = f" --revision {revision}" if revision else ""
        fetch = "" if looks_local else f" (hf download {name}{wanted})"
        raise UserError(
            f"model.path={config.model.path}: no such checkpoint directory (config.json is missing there), "
            f"and no model of that name in the local hub cache{fetch}"
        )


def _check_harnesses(config: Config) -> None:
    mix = config.mix
    if len(set(mix.harnesses)) < len(mix.harnesses):
        raise UserError(f"mix.harnesses={mix.harnesses} names one twice")
    if not mix.harnesses:
        raise UserError("mix.harnesses is empty: name at least one harness")
    for key, names in (("weights", mix.weights), ("readmit", mix.readmit)):
        if strangers := sorted(set(names) - set(mix.harnesses)):
            raise UserError(f"mix.{key} names {', '.join(strangers)}: not in mix.harnesses={mix.harnesses}")
    weighted_cycle(mix.harnesses, mix.weights)
    recipes = [get_harness(name) for name in mix.harnesses]
    if complaints := [text for recipe in recipes if (text := _complaint(recipe, config))]:
        raise UserError("; ".join(complaints))


def _complaint(recipe: HarnessRecipe, config: Config) -> str | None:
    try:
        recipe.check_installed(harness_root(config.harness.home))
    except UserError as error:
        return str(error)
    return None


def _check_place(run_dir: Path) -> None:
    if run_dir == SOURCE:
        raise UserError(f"run_dir={run_dir} is the checkout: give the run a directory of its own, run_dir=runs/mine")
    existing = next(parent for parent in [run_dir, *run_dir.absolute().parents] if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"run_dir={run_dir}: {existing} is not a directory that you may write to")
    if run_dir.is_symlink():
        raise UserError(f"run_dir={run_dir} is a link: give the directory itself")
    if (free := free_gb(run_dir)) < ROOM_GB:
        raise UserError(f"run_dir={run_dir}: only {free:.2f} GB free, a run needs at least {ROOM_GB:g} GB")


def check_tasks_readable(config: Config, run: RunDirectory) -> str:
    """Have the tasks at hand, and their images, if they are asked for. Returns how many there are, and of what level.

    Raises UserError for a task directory that is not in Harbor's format, files that give an answer away, or an image
    that cannot be had.
    """
    train, test = (load_split(config, run, split) for split in ("train", "test"))
    inspect_files(config, train, test)
    if config.sandbox.image == TASK:
        for task in {task.image: task for task in (*train, *test) if task.image}.values():
            _have_environment(config, task)
    return f"{describe(train)} for training, {describe(test)} held out"


def _have_environment(config: Config, task: HarborTask) -> None:
    """Built before, or an image that is fetched now."""
    if find_build(task.image) is None:
        if "://" not in task.image:
            raise UserError(build_missing(task.image, task.ref.task_id))
        fetch_image(replace(config.sandbox, image=task.image))

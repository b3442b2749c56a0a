"""Checks of what a machine has: disk for the run directory and on the node, memory, processes, open files."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import tempfile
from pathlib import Path

from pipeline.config import Config
from pipeline.engine.device import transfer_kind
from pipeline.hub import model_file, weight_shapes
from pipeline.launch.preflight_check import LATER, Grounds, NotHere, Refused
from pipeline.launch.preflight_settings import figures, refuse_if
from pipeline.launch.retention import LEAST_CHECKPOINTS, size_of

ROOM_GB = 1.0  # beyond everything that can be told before
GB = 1e9
MIB = 1 << 20
STATE_BYTES = 16  # of a parameter in a checkpoint: its value, DeepSpeed's copy in float32, Adam's two moments
TOKEN_BYTES = 9  # of a row on disk: id, logprob, mask
FILLED = 0.25  # of the context window, by a rollout on average
OWN_FILES, ROLLOUT_FILES = 256, 24  # open in an engine rank, and for each rollout beside that
LEAST_PROCESSES = 32  # threads of one harness in Node with a shell
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def free_gb(place: Path) -> float:
    """Free space where ``place`` is or will be."""
    existing = next(parent for parent in [place, *place.absolute().parents] if parent.exists())
    return shutil.disk_usage(existing).free / GB


# --- disk


def disk(grounds: Grounds) -> str:
    """Whether what the run will keep fits beside what lies there, and into its quota."""
    config, run_dir = grounds.config, Path(grounds.config.run_dir)
    parts, quota = estimate_gb(config), config.storage.quota_gb
    shown = ", ".join(f"{name} {size:.2g}" for name, size in parts.items())
    if quota is not None and (least := least_gb(config)) > quota:
        raise Refused(
            f"storage.quota_gb={quota:g}, but {LEAST_CHECKPOINTS} checkpoints and the exports that stay take "
            f"{least:.2f} GB"
        )
    there = sum(size_of(run_dir / name) for name in ("checkpoints", "models")) / GB
    wanted = min(sum(parts.values()), quota or math.inf)
    needed, free = max(0.0, wanted - there) + ROOM_GB, free_gb(run_dir)
    if free < needed:
        raise Refused(f"run_dir={run_dir}: only {free:.2f} GB free, the run needs {needed:.2f} GB more ({shown})")
    goes = "" if quota is None or sum(parts.values()) <= quota else f"; over storage.quota_gb={quota:g} old files go"
    return f"{free:.0f} GB free, at most {needed:.2f} GB more to be written ({shown}){goes}"


def estimate_gb(config: Config) -> dict[str, float]:
    """What a run keeps, in GB. While a checkpoint is written the older ones still lie there."""
    training, storage = config.training, config.storage
    held, others = _exports(config)
    updates = training.updates
    if storage.rollouts is not None:  # counted back from the oldest checkpoint, and looked at after each
        updates = min(updates, storage.rollouts + (training.keep_checkpoints + 1) * training.checkpoint_every)
    rollouts = updates * config.algorithm.groups_per_update * config.algorithm.group_size
    return {
        "checkpoints": (training.keep_checkpoints + 1) * _checkpoint_gb(config),
        "models": (1 + held + others) * _model_gb(config),
        "rollouts": rollouts * FILLED * config.model.max_model_len * TOKEN_BYTES / GB,
    }


def least_gb(config: Config) -> float:
    """What stays whatever a quota says, in GB."""
    held, others = _exports(config)
    models = 1 + held + (others if _evaluates_at_the_end(config) else min(1, others))
    checkpoints = min(config.training.keep_checkpoints, LEAST_CHECKPOINTS)
    return checkpoints * _checkpoint_gb(config) + models * _model_gb(config)


def _exports(config: Config) -> tuple[int, int]:
    """How many exports training.keep_every holds, and how many others stay at once."""
    training, evaluation = config.training, config.evaluation
    held = training.updates // training.keep_every if training.keep_every else 0
    others = training.updates // (training.checkpoint_every * evaluation.every) if evaluation.every else 0
    if evaluation.keep_exports and not _evaluates_at_the_end(config):
        others = min(others, evaluation.keep_exports)
    return held, others


def _evaluates_at_the_end(config: Config) -> bool:
    """Without Slurm, what is exported on the way stays until the training is done."""
    return config.cluster.name == "local" and config.evaluation.every > 0


def _checkpoint_gb(config: Config) -> float:
    return parameters(config.model.path) * _trained_share(config) * STATE_BYTES / GB


def _model_gb(config: Config) -> float:
    return parameters(config.model.path) * WEIGHT_BYTES[config.model.dtype] / GB


def _trained_share(config: Config) -> float:
    """How many of the parameters a checkpoint holds: all, or those of adapters of a square layer."""
    place = model_file(config.model.path, "config.json")
    if config.training.lora.rank is None or place is None:
        return 1.0
    width = json.loads(place.read_text()).get("hidden_size", 1)
    return min(1.0, 2 * config.training.lora.rank / width)


def parameters(model_path: str) -> float:
    """How many parameters a checkpoint has, from the headers of its safetensors; 0 where it has none."""
    return float(sum(math.prod(shape) for shape in weight_shapes(model_path).values()))


# --- the node


def node(grounds: Grounds) -> str:
    """Whether as many rollouts as may run at once find what they need on this machine."""
    if not grounds.here:
        raise NotHere(LATER)
    config, sandbox = grounds.config, grounds.config.sandbox
    memory_mb, needed_mb = _memory_mb(config), [_measured_mb(name) for name in config.mix.harnesses]
    largest = max(needed_mb)
    files, hard_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted_files = OWN_FILES + ROLLOUT_FILES * config.concurrency
    scratch, wanted_gb = Path(tempfile.gettempdir()), _scratch_gb(config)
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    wanted_processes = LEAST_PROCESSES * config.concurrency
    unbound = os.geteuid() == 0
    refuse_if(
        (
            (sandbox.memory_mb < largest, f"sandbox.memory_mb={sandbox.memory_mb}, but a harness of the mix took "
             f"{largest:.0f} MB in its check: it would be killed and score 0"),
            (config.concurrency * largest > memory_mb, f"concurrency={config.concurrency} harnesses of {largest:.0f} "
             f"MB are more than the {memory_mb:.0f} MB of a node"),
            (sandbox.processes < LEAST_PROCESSES, f"sandbox.processes={sandbox.processes}: a harness takes up to "
             f"{LEAST_PROCESSES}"),
            (not unbound and 0 <= processes < wanted_processes, f"ulimit -u is {processes}; concurrency="
             f"{config.concurrency} takes {wanted_processes}"),
            (0 <= files < wanted_files, f"ulimit -n is {files}; concurrency={config.concurrency} takes {wanted_files}"),
            (not unbound and 0 <= hard_files < sandbox.open_files, f"sandbox.open_files={sandbox.open_files} is above "
             f"this machine's hard limit of {hard_files}"),
            (free_gb(scratch) < wanted_gb, f"{scratch}: only {free_gb(scratch):.2f} GB free, rollouts and weights on "
             f"their way need {wanted_gb:.2f} GB"),
        )
    )  # fmt: skip
    return f"{memory_mb / 1024:.0f} GB memory, {files} open files, {free_gb(scratch):.0f} GB free in {scratch}"


def _memory_mb(config: Config) -> float:
    if config.cluster.name != "local" and config.cluster.mem_gb is not None:
        return config.cluster.mem_gb * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / MIB


def _measured_mb(harness: str) -> float:
    """Memory that a harness took in its check, over all scenes; 0 where it was not checked on this machine."""
    return max((scene.get("memory_mb", 0.0) for scene in figures(harness).values()), default=0.0)


def _scratch_gb(config: Config) -> float:
    """Weights that are handed over as a file (the new one beside the old), and what sandboxes insist on."""
    weights = parameters(config.model.path) * WEIGHT_BYTES[config.model.dtype]
    files = 2 * weights if transfer_kind(config.engine.weight_transfer) == "file" else 0.0
    return (files + config.sandbox.disk_free_mb * MIB) / GB

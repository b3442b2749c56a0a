"""The cohort of an evaluation: what exactly is evaluated, written down when it begins and checked when it goes on.

evaluation/<label>/cohort.json is published once; only versions of further harnesses are added to it later, each by
the first job that has them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pipeline.config import Config, UserError
from pipeline.harness.base import get_harness
from pipeline.launch.data import evenly, load_split
from pipeline.launch.run_directory import RunDirectory
from pipeline.report.store import publish_new, write_json
from pipeline.tasks.fingerprint import content_hash, difficulty_level, grader_hash

COHORT = "cohort.json"
RESERVED = ("before", "after")  # labels of the evaluations that training makes
SCHEMA = 1
NO_LIMIT = ("ttl_s", "max_concurrent")  # of a session's policy: they do not shape what a rollout can do
PARTS = {"content": "its instruction, environment or limits", "grader": "its tests"}

log = logging.getLogger("yoke.evaluation")


def read_cohort(run: RunDirectory, label: str) -> dict[str, Any] | None:
    """None for an evaluation that did not begin, or began before cohorts were pinned."""
    path = run.evaluation(label) / COHORT
    return json.loads(path.read_text()) if path.exists() else None


def pin_cohort(config: Config, run: RunDirectory, label: str, harnesses: Sequence[str], size: int = 0) -> None:
    """Write the cohort down when the evaluation begins, check it when it goes on. ``size``: so many tasks (0: all).

    Raises UserError that names the first task, harness or limit which is not what it was.
    """
    now = describe(config, run, harnesses, size)
    path = run.evaluation(label) / COHORT
    if not path.exists():
        if any(path.parent.glob("*.parquet")):
            log.warning("evaluation %s began before cohorts were pinned; its cohort is pinned as it is now", label)
        publish_new(path, (json.dumps(now, indent=2) + "\n").encode())
    pinned = json.loads(path.read_text())
    if wrong := changed(pinned, now):
        raise UserError(f"evaluation {label} of {run.root} cannot go on: {wrong}; {_way_out(label)}")
    if added := {name: version for name, version in now["harnesses"].items() if name not in pinned["harnesses"]}:
        write_json(path, pinned | {"harnesses": pinned["harnesses"] | added})


def describe(config: Config, run: RunDirectory, harnesses: Sequence[str], size: int = 0) -> dict[str, Any]:
    """The contents of cohort.json. A harness runs at its recipe's version or not at all: that is the installed one."""
    tasks = {
        task.ref.task_id: {
            "content": content_hash(task),
            "grader": grader_hash(task),
            "difficulty": difficulty_level(task),
        }
        for task in sorted(evenly(load_split(config, run, "test"), size), key=lambda task: task.ref.task_id)
    }
    return {
        "schema": SCHEMA,
        "sha256": _hash_of(tasks, "content"),
        "graders_sha256": _hash_of(tasks, "grader"),
        "rollouts_per_task": config.evaluation.rollouts_per_task,
        "limits": limits(config),
        "harnesses": {name: get_harness(name).version for name in harnesses},
        "tasks": tasks,
    }


def limits(config: Config) -> dict[str, Any]:
    """What bounds a rollout and how it samples."""
    policy = {name: value for name, value in asdict(config.harness.sampling).items() if name not in NO_LIMIT}
    return {**policy, "context_tokens": config.model.max_model_len, "timeout_s": config.harness.timeout_s}


def changed(pinned: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first thing that is not what it was, as the middle of a sentence; "" when there is none."""
    old, new = pinned["tasks"], now["tasks"]
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            return f"task {name} is gone"
        if name not in old:
            return f"task {name} is new"
        if parts := [words for part, words in PARTS.items() if old[name][part] != new[name][part]]:
            return f"task {name} is not what it was ({', '.join(parts)})"
    settings = (
        *_pairs(pinned["harnesses"], now["harnesses"], "harness "),
        *_pairs(pinned["limits"], now["limits"], ""),
        *_pairs(pinned, now, "", ("rollouts_per_task",)),
    )
    return next(iter(settings), "")


def _pairs(old: Mapping[str, Any], new: Mapping[str, Any], kind: str, names: Sequence[str] = ()) -> list[str]:
    shared = [name for name in (names or old) if name in old and name in new]
    return [f"{kind}{name} was {old[name]} and is {new[name]}" for name in shared if old[name] != new[name]]


def _way_out(label: str) -> str:
    undo = "put that back"
    if label in RESERVED:
        return f"{undo}, or train in another run_dir=…"
    return f"{undo}, or evaluate under another name: stage.label=…"


def _hash_of(tasks: Mapping[str, Mapping[str, Any]], part: str) -> str:
    pairs = [[name, tasks[name][part]] for name in sorted(tasks)]
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()

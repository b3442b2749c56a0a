"""The task sets that tasks.kind names: where each lies, and which of its tasks a run takes.

A set is a directory of Harbor tasks, made or fetched if need be; what is wrong inside a task is left to harbor.py.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.config import TasksConfig, UserError
from pipeline.tasks.fingerprint import difficulty_level
from pipeline.tasks.generate import generate_tasks
from pipeline.tasks.harbor import HarborTask, load_tasks
from pipeline.tasks.hub import fetch_dataset
from pipeline.tasks.humaneval import build_humaneval, in_test

KINDS = ("generated", "harbor", "smoldata", "humaneval")


@dataclass(frozen=True)
class Named:
    """A line of tasks.train_names: a task, and what else the list says about it."""

    name: str
    instruction_sha256: str | None = None
    difficulty: str | None = None


def load_set(tasks: TasksConfig, split: str, generated: Path) -> list[HarborTask]:
    """The tasks of ``train`` or ``test``, in a fixed order; ``generated`` is where made-up ones are written.

    Raises UserError for a set that is missing, unreachable or not in Harbor's format, and when nothing is left of it.
    """
    if tasks.kind not in KINDS:
        raise UserError(f"tasks.kind={tasks.kind!r} is unknown; one of: {', '.join(KINDS)}")
    size = _of(tasks, "size", split)
    if tasks.kind == "generated":
        return load_tasks(generate_tasks(generated, split, size, tasks.seed))
    names = _read_names(tasks, split)
    only = None if names is None else {name.name for name in names}
    found = load_tasks(_place(tasks, split, names), tasks.host_env, only)
    if tasks.kind == "humaneval":
        found = [task for task in found if in_test(task.ref.task_id, tasks.test_share) == (split == "test")]
    if names is not None:
        found = _take(found, names, f"tasks.{split}_names={_of(tasks, 'names', split)}")
    if tasks.levels:
        found = _of_levels(found, tasks.levels, split)
    if not found:
        raise UserError(f"no {split} task is left: see tasks.{split}_names, tasks.levels and tasks.test_share")
    return found[:size] if size else found


def describe(tasks: Sequence[HarborTask]) -> str:
    """``1000 (400 medium, 600 hard)``."""
    levels = Counter(difficulty_level(task) or "" for task in tasks)
    named = ", ".join(f"{count} {level or 'of no level'}" for level, count in sorted(levels.items()))
    return f"{len(tasks)} ({named})" if any(levels) else str(len(tasks))


def _of(tasks: TasksConfig, what: str, split: str):  # type: ignore[no-untyped-def]
    return getattr(tasks, f"{split}_{what}")


def _place(tasks: TasksConfig, split: str, names: Sequence[Named] | None) -> Path:
    if tasks.kind == "humaneval":
        return build_humaneval(tasks.source)
    given = tasks.train if split == "train" else tasks.test
    if given and Path(given).is_dir():
        return Path(given)
    if tasks.kind == "smoldata" and given:
        return fetch_dataset(f"tasks.{split}", given, [name.name for name in names] if names is not None else None)
    raise UserError(f"tasks.{split}={given!r} is no directory of Harbor tasks")


def _read_names(tasks: TasksConfig, split: str) -> list[Named] | None:
    """The file tasks.train_names: JSON (names, or objects with ``name``), or one name a line."""
    given = _of(tasks, "names", split)
    if given is None:
        return None
    key = f"tasks.{split}_names={given}"
    try:
        text = Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key} cannot be read: {error}") from None
    try:
        rows = json.loads(text) if text.lstrip().startswith("[") else text.split()
        names = [Named(row) if isinstance(row, str) else _named(row) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{key} is no list of task names: {type(error).__name__}: {error}") from None
    if twice := [name for name, count in Counter(name.name for name in names).items() if count > 1]:
        raise UserError(f"{key} names {twice[0]} twice")
    return names


def _named(row: dict[str, str]) -> Named:
    return Named(row["name"], row.get("instruction_sha256"), row.get("difficulty"))


def _take(found: Sequence[HarborTask], names: Sequence[Named], key: str) -> list[HarborTask]:
    """The named tasks, in the list's order."""
    known = {task.ref.task_id: task for task in found}
    if missing := [name.name for name in names if name.name not in known]:
        shown = ", ".join(missing[:3])
        raise UserError(f"{key}: {len(missing)} of its {len(names)} tasks are not in the set, the first: {shown}")
    return [_as_listed(known[name.name], name, key) for name in names]


def _as_listed(task: HarborTask, name: Named, key: str) -> HarborTask:
    if name.instruction_sha256:
        found = hashlib.sha256((task.ref.path / "instruction.md").read_bytes()).hexdigest()
        if found != name.instruction_sha256:
            raise UserError(f"{key}: {name.name}: instruction.md is another than the list's: its sha256 is {found}")
    return replace(task, metadata={**task.metadata, "difficulty_level": name.difficulty}) if name.difficulty else task


def _of_levels(found: Sequence[HarborTask], levels: Sequence[str], split: str) -> list[HarborTask]:
    known = sorted({difficulty_level(task) or "" for task in found})
    if strange := [level for level in levels if level not in known]:
        has = ", ".join(level or "(none)" for level in known)
        raise UserError(f"tasks.levels={list(levels)}: no {split} task is {strange[0]}; there are: {has}")
    return [task for task in found if difficulty_level(task) in levels]

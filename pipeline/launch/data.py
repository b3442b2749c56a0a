"""The tasks of a run: generated into its directory, or read where the user keeps them; checked before anything is
spent.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.config import Config, UserError
from pipeline.launch.run_directory import RunDirectory
from pipeline.records import TaskRef
from pipeline.tasks.generate import generate_tasks
from pipeline.tasks.harbor import HarborTask, load_tasks


def load_splits(config: Config, run: RunDirectory) -> tuple[list[TaskRef], list[TaskRef]]:
    """(training tasks, held-out tasks)."""
    return [task.ref for task in load_split(config, run, "train")], [
        task.ref for task in load_split(config, run, "test")
    ]


def split_size(config: Config, run: RunDirectory, split: str) -> int:
    """How many tasks ``train`` or ``test`` has. Writes nothing."""
    if config.tasks.kind == "generated":
        return config.tasks.train_size if split == "train" else config.tasks.test_size
    return len(load_split(config, run, split))


def load_split(config: Config, run: RunDirectory, split: str) -> list[HarborTask]:
    """The tasks of ``train`` or ``test``.

    Raises UserError for a directory that is missing, empty or not in Harbor's format.
    """
    size = config.tasks.train_size if split == "train" else config.tasks.test_size
    if config.tasks.kind == "generated":
        place = generate_tasks(run.root / "tasks", split, size, config.tasks.seed)
        return load_tasks(place)
    if config.tasks.kind != "harbor":
        raise UserError(f"tasks.kind={config.tasks.kind!r} is unknown: generated or harbor")
    given = config.tasks.train if split == "train" else config.tasks.test
    if not given or not Path(given).is_dir():
        raise UserError(f"tasks.{split}={given!r} is no directory of Harbor tasks")
    tasks = load_tasks(Path(given))
    if not tasks:
        raise UserError(f"tasks.{split}={given!r} holds no task")
    return tasks[:size] if size else tasks

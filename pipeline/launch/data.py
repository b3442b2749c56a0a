"""The tasks of a run: generated into its directory, or read where the user keeps them; checked before anything is
spent.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.config import Config
from pipeline.launch.run_directory import RunDirectory
from pipeline.records import TaskRef
from pipeline.tasks.harbor import HarborTask
from pipeline.tasks.sets import load_set


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
    """The tasks of ``train`` or ``test``. Raises UserError as load_set does."""
    return load_set(config.tasks, split, run.root / "tasks")


def evenly(tasks: Sequence[HarborTask], count: int) -> list[HarborTask]:
    """``count`` of the tasks (0, or more than there are: all), evenly spread over their ids: always the same ones."""
    ordered = sorted(tasks, key=lambda task: task.ref.task_id)
    if not 0 < count < len(ordered):
        return list(tasks)
    return [ordered[number * len(ordered) // count] for number in range(count)]

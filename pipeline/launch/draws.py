"""The blocks of a curriculum in the run directory: what was drawn once is what every later attempt goes by.

One file a block, written once, so that a crash at any moment, or a ghost of an earlier attempt, changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config import Config, UserError
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.storage import Storage
from pipeline.records import TaskRef
from pipeline.report.store import publish_new
from pipeline.stages.curriculum import Block, Curriculum, make_curriculum
from pipeline.stages.schedule import Schedule, make_schedule


def open_schedule(tasks: Sequence[TaskRef], config: Config, run: RunDirectory, needed: int = 0) -> Schedule:
    """The schedule of a run, with what an earlier attempt has drawn.

    ``needed``: places that were handed out. Raises UserError when a block of those is missing.
    """
    if not config.curriculum.enabled:
        return make_schedule(tasks, config)
    schedule = make_curriculum(tasks, config)
    while (path := _path(run, schedule)).exists():
        schedule.add(_read(path))
    if schedule.horizon < needed:
        raise UserError(f"{path} is missing: the run handed out {needed} groups of its curriculum")
    return schedule


def keep(block: Block, schedule: Curriculum, run: RunDirectory, storage: Storage | None = None) -> Block:
    """Write the block that `Curriculum.draw` gave, and return what counts: the block that was written first."""
    path = _path(run, schedule)

    def write() -> Block:
        publish_new(path, json.dumps(block).encode() + b"\n")
        return _read(path)

    return storage.publish(f"write {path.name}", write) if storage else write()


def draw_until(schedule: Schedule, counted: Mapping[str, Sequence[Any]], places: int, run: RunDirectory) -> None:
    """Draw what is lacking of the first ``places``; nothing to do without a curriculum."""
    while isinstance(schedule, Curriculum) and schedule.horizon < places:
        schedule.add(keep(schedule.draw(counted), schedule, run))


def _path(run: RunDirectory, schedule: Curriculum) -> Path:
    return run.curriculum / f"{schedule.horizon:08d}.json"


def _read(path: Path) -> Block:
    try:
        return [(str(task_id), float(due)) for task_id, due in json.loads(path.read_text())]
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}") from error

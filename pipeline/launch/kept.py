"""Rollouts of earlier attempts that the present one can use instead of rolling out again.

Their directories are listed once: on a shared file system a look for each rollout in each of them adds up.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.config import UserError
from pipeline.launch.run_directory import Attempt
from pipeline.records import GroupSpec, RolloutRecord
from pipeline.report.store import read_group
from pipeline.stages.evaluation import is_graded
from pipeline.stages.flow import is_usable


def rollout_name(spec: GroupSpec, index: int) -> str:
    """The file of one finished rollout, which holds it until its group is closed."""
    return f"{spec.group_id}-{index}.parquet"


def group_name(spec: GroupSpec) -> str:
    """The file of a closed group."""
    return f"{spec.group_id}.parquet"


class KeptRollouts:
    """What lies in the directories of all attempts before ``attempt``."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._read: tuple[Path | None, tuple[RolloutRecord, ...]] = (None, ())  # the file that was read last

    def find(self, spec: GroupSpec, index: int, work: dict[str, Any]) -> RolloutRecord | None:
        """The newest graded one, fresh enough and of weights that led to the present ones."""
        found = [path for name in (rollout_name(spec, index), group_name(spec)) for path in self._files.get(name, ())]
        for path in sorted(found, key=lambda path: path.parent.parent.name, reverse=True):  # newest attempt first
            record = next((record for record in self._records(path) if record.index == index), None)
            if record and is_graded(record) and is_usable(record, work["keep_from"], work["lineage"]):
                return record
        return None

    @cached_property
    def _files(self) -> dict[str, list[Path]]:
        """File name → where it lies."""
        found: dict[str, list[Path]] = {}
        for number in self._attempt.run.attempt_numbers():
            earlier = self._attempt.run.attempt(number)
            for directory in (earlier.rollouts, earlier.groups) if number < self._attempt.number else ():
                for path in directory.glob("*.parquet"):
                    found.setdefault(path.name, []).append(path)
        return found

    def _records(self, path: Path) -> tuple[RolloutRecord, ...]:
        """All rollouts of a group ask for the same file, one after the other."""
        read = self._read
        if read[0] != path:  # one assignment: several threads ask
            read = self._read = (path, _read(path))
        return read[1]


def _read(path: Path) -> tuple[RolloutRecord, ...]:
    """None when it is gone since it was listed: a ghost has closed its group, or its tokens were let go."""
    try:
        return read_group(path)
    except UserError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return ()
        raise

"""Stage 5: held-out tasks × harnesses. The first graded result of a cell stands; only ungraded cells are tried again.

A cell is ``rollouts_per_task`` rollouts of one (task, harness), kept as a Parquet file under ``evaluation/<label>/``,
so an interrupted evaluation goes on where it was. No file is ever replaced: what a further try adds lies beside it
(``CELL.parquet``, then ``CELL.parquet.2``, …), and of two grades of one rollout the lower number's counts. So a late
write of a dead attempt changes nothing that was graded.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from pipeline.records import GroupSpec, RolloutRecord, TaskRef
from pipeline.report.store import read_figures, read_group, write_new_group

INCOMPLETE = 3  # exit code of a job whose evaluation still lacks grades


@dataclass(frozen=True)
class Coverage:
    """How many of the planned rollouts are graded."""

    graded: int
    planned: int

    @property
    def complete(self) -> bool:
        return self.graded == self.planned


@dataclass
class _Cell:
    spec: GroupSpec
    path: Path
    tries: int = 0
    engine: str = ""
    graded: set[int] = field(default_factory=set)  # indices of its rollouts

    def note(self, records: Sequence[RolloutRecord]) -> None:
        self.graded |= {record.index for record in records if is_graded(record)}

    def missing(self) -> list[int]:
        """Indices of rollouts without a grade."""
        return [index for index in range(self.spec.size) if index not in self.graded]


def evaluation_specs(tasks: Sequence[TaskRef], harnesses: Sequence[str], size: int) -> list[GroupSpec]:
    """One cell of ``size`` rollouts for each (task, harness); harnesses alternate, so that an early look is
    balanced.
    """
    return [GroupSpec(f"{harness}--{task.task_id}", task, harness, 0, size) for task in tasks for harness in harnesses]


class Cells:
    """Groups outside training, leased to engine ranks until each rollout is graded or the tries of its cell are used
    up.
    """

    def __init__(self, directory: Path, specs: Sequence[GroupSpec], retries: int) -> None:
        """One Parquet file a cell under ``directory``; what lies there already is kept."""
        self._retries = retries
        self._all = [_Cell(spec, directory / f"{spec.group_id}.parquet") for spec in specs]
        self._directory = directory
        written = _names(directory)
        for cell in self._all:
            cell.note(_read(cell.path, written))
        self._waiting = deque(cell for cell in self._all if cell.missing())
        self._open: dict[str, _Cell] = {}

    def lease(self, engine: str) -> dict[str, Any] | None:
        """The next cell as work for an engine rank, or None while none waits."""
        if not self._waiting:
            return None
        cell = self._waiting.popleft()
        cell.tries += 1
        cell.engine = engine
        self._open[cell.spec.group_id] = cell
        return {
            "kind": "evaluate",
            "group_id": cell.spec.group_id,
            "task_id": cell.spec.task.task_id,
            "task_path": str(cell.spec.task.path),
            "harness": cell.spec.harness,
            "pass_index": cell.spec.pass_index,
            "size": cell.spec.size,
            "indices": cell.missing(),
            "path": str(cell.path),
        }

    def close(self, work: dict[str, Any], records: Sequence[RolloutRecord]) -> None:
        """A cell came back with the ``records`` of one try; it waits again while rollouts lack a grade and tries are
        left.
        """
        cell = self._open.pop(work["group_id"], None)
        if cell is None:
            return
        cell.note(records)
        if cell.missing() and cell.tries <= self._retries:
            self._waiting.append(cell)

    def release(self, engine: str) -> None:
        """An engine rank is gone: its open cells wait again, without costing a try."""
        for group_id in [group_id for group_id, cell in self._open.items() if cell.engine == engine]:
            self.give_back(group_id)

    @property
    def out(self) -> list[tuple[str, int, str]]:
        """(cell, try, engine) of every cell that is being rolled out."""
        return [(group_id, cell.tries, cell.engine) for group_id, cell in self._open.items()]

    def give_back(self, group_id: str, records: Sequence[RolloutRecord] = (), engine: str | None = None) -> None:
        """Nobody rolls this cell out any more: it waits again, without having cost a try. ``records``: what had ended
        of it. ``engine``: only if that is who has it.
        """
        cell = self._open.get(group_id)
        if cell is None or engine not in (None, cell.engine):
            return
        del self._open[group_id]
        cell.note(records)
        cell.tries -= 1
        if cell.missing():
            self._waiting.append(cell)

    @property
    def done(self) -> bool:
        return not self._waiting and not self._open

    def counts(self) -> dict[str, int]:
        """Cells finished and planned, for the live view."""
        return {"done": len(self._all) - len(self._waiting) - len(self._open), "total": len(self._all)}

    def records(self) -> list[RolloutRecord]:
        """Every rollout so far, graded or not."""
        written = _names(self._directory)
        return [record for cell in self._all for record in _read(cell.path, written)]

    def coverage(self) -> Coverage:
        parts = self.coverage_by_harness().values()
        return Coverage(sum(part.graded for part in parts), sum(part.planned for part in parts))

    def coverage_by_harness(self) -> dict[str, Coverage]:
        """The same for each harness alone."""
        graded = Counter(record.harness for record in self.records() if is_graded(record))
        planned: Counter[str] = Counter()
        for cell in self._all:
            planned[cell.spec.harness] += cell.spec.size
        return {harness: Coverage(graded[harness], size) for harness, size in planned.items()}


def is_graded(record: RolloutRecord) -> bool:
    return record.verdict.correctness is not None


def read_cell(path: Path) -> tuple[RolloutRecord, ...]:
    """The rollouts of a cell, of all its files; none when it was not written yet."""
    return _read(path, _names(path.parent))


def read_cells(directory: Path) -> list[RolloutRecord]:
    """The rollouts of every cell under ``directory``."""
    written = _names(directory)
    cells = sorted(name for name in written if name.endswith(".parquet") and not name.startswith("."))
    return [record for name in cells for record in _read(directory / name, written)]


def read_tries(directory: Path) -> list[RolloutRecord]:
    """What every try of every cell under ``directory`` gave, without rows: what was not graded too."""
    cells = sorted(name for name in _names(directory) if ".parquet" in name and not name.startswith("."))
    return [record for name in cells for record in read_figures(directory / name)]


def write_cell(path: Path, records: Sequence[RolloutRecord]) -> Path:
    """Add a try's rollouts to a cell. Returns the file."""
    return next(place for place in _files(path) if not place.exists() and write_new_group(place, records))


def _files(path: Path) -> Iterator[Path]:
    """Where a cell's tries lie, in order."""
    yield path
    yield from (path.with_name(f"{path.name}.{number}") for number in count(2))


def _names(directory: Path) -> set[str]:
    """What was written, by a listing: NFS remembers for a while that a single name was not there."""
    return set(os.listdir(directory)) if directory.is_dir() else set()


def _read(path: Path, written: set[str]) -> tuple[RolloutRecord, ...]:
    records: list[RolloutRecord] = []
    for place in takewhile(lambda place: place.name in written, _files(path)):
        records = merge(records, read_group(place))
    return tuple(records)


def merge(old: Sequence[RolloutRecord], new: Sequence[RolloutRecord]) -> list[RolloutRecord]:
    """First graded result stands: a new rollout replaces an old one of the same index only when that had no grade."""
    by_index = {record.index: record for record in new}
    by_index |= {record.index: record for record in old if is_graded(record) or record.index not in by_index}
    return [by_index[index] for index in sorted(by_index)]

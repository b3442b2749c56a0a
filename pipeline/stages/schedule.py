"""Which group comes when. A pure function of the seed, so that a resumed run schedules what it would have scheduled."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.records import GroupSpec, TaskRef


@dataclass(frozen=True)
class Schedule:
    """Pass after pass over the tasks, each pass in its own order; in every pass each task moves on to the next
    harness.
    """

    tasks: Sequence[TaskRef]
    harnesses: Sequence[str]
    group_size: int
    seed: int

    def group(self, index: int) -> GroupSpec:
        """The group at place ``index`` of the endless schedule."""
        pass_index, place = divmod(index, len(self.tasks))
        task_number = self._order(pass_index)[place]
        harness = self.harnesses[(task_number + pass_index) % len(self.harnesses)]
        return GroupSpec(f"g{index:06d}", self.tasks[task_number], harness, pass_index, self.group_size)

    def _order(self, pass_index: int) -> list[int]:
        order = list(range(len(self.tasks)))
        random.Random(f"{self.seed}/{pass_index}").shuffle(order)
        return order

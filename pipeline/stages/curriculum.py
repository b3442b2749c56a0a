"""A schedule that draws tasks by how hard they have been, block after block.

Harnesses follow each other as they do without it, so their shares stay what they are.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.config import Config, UserError
from pipeline.records import GroupSpec, TaskRef
from pipeline.stages.difficulty import Seen, by_task
from pipeline.stages.schedule import Schedule

UPDATES = 4  # a block's groups, as updates
JITTER = 0.1  # of the time until a task comes again, either way: else the same tasks would come together for ever
NEVER = -1.0  # when a task that never came was due, and before
Block = list[tuple[str, float]]  # (task id, when it is due again) of each place


@dataclass(frozen=True)
class Curriculum(Schedule):
    """Tasks come in proportion to p·(1 − p), p being the share of their rollouts that solved them.

    A task of weight w is due again after as many places as all weights together hold w; the next block holds the tasks
    that are due first, and none twice. So even one of the least weight (``floor``) comes again and again, and those
    that never came go first. ``prior`` rollouts of p = 1/2 are added to every task's. What a block holds hangs on the
    figures at the moment of its `draw`; whoever draws keeps it and gives it to `add`, in this run and after a resume.
    """

    prior: float = 4.0
    floor: float = 0.1
    block: int = 64
    _drawn: list[tuple[int, int]] = field(default_factory=list, init=False, repr=False, compare=False)
    _numbers: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _met: Counter[tuple[int, str]] = field(default_factory=Counter, init=False, repr=False, compare=False)
    _times: Counter[int] = field(default_factory=Counter, init=False, repr=False, compare=False)
    _due: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._numbers.update({task.task_id: number for number, task in enumerate(self.tasks)})

    @property
    def horizon(self) -> int:
        return len(self._drawn)

    def group(self, index: int) -> GroupSpec:
        """The group at place ``index``, which must have been drawn. Its pass is how often its task came before."""
        number, times = self._drawn[index]
        return replace(super().group(index), task=self.tasks[number], pass_index=times)

    def weight(self, seen: Seen) -> float:
        """4·p·(1 − p), which is at most 1, but at least ``floor``."""
        share = (seen.correctness + self.prior / 2) / (seen.rollouts + self.prior)
        return max(self.floor, 4 * share * (1 - share))

    def draw(self, counted: Mapping[str, Sequence[Any]]) -> Block:
        """The next block; nothing is changed. The same after the same blocks, seed and figures."""
        start, seen = self.horizon, by_task(counted)
        rng = random.Random(f"{self.seed}/curriculum/{start}")
        weights = [self.weight(seen.get(task.task_id, Seen())) for task in self.tasks]
        due = [self._due.get(number, NEVER - rng.random()) for number in range(len(weights))]
        chosen, together = sorted(range(len(weights)), key=lambda number: due[number])[: self.block], sum(weights)
        block: Block = []
        for index in range(start, start + len(chosen)):
            harness = super().group(index).harness
            number = min(chosen, key=lambda number: self._met[number, harness])
            chosen.remove(number)
            pause = together / weights[number] * rng.uniform(1 - JITTER, 1 + JITTER)
            block.append((self.tasks[number].task_id, pause + (due[number] if number in self._due else index)))
        return block

    def add(self, block: Block) -> None:
        """The next block. Raises UserError for a task that is not among the tasks."""
        for task_id, due in block:
            if task_id not in self._numbers:
                raise UserError(f"task {task_id} was drawn for this run, but is not among its tasks any more")
            number, index = self._numbers[task_id], self.horizon
            self._drawn.append((number, self._times[number]))
            self._times[number] += 1
            self._met[number, super().group(index).harness] += 1
            self._due[number] = due


def make_curriculum(tasks: Sequence[TaskRef], config: Config) -> Curriculum:
    """The schedule of a run over ``tasks`` with ``curriculum.enabled``, of which nothing is drawn yet."""
    algorithm, chosen = config.algorithm, config.curriculum
    block = UPDATES * algorithm.groups_per_update
    plain = (tasks, config.mix.harnesses, algorithm.group_size, config.seed, config.mix.weights)
    return Curriculum(*plain, prior=chosen.prior, floor=chosen.floor, block=block)

"""Which group comes when. A pure function of the seed, so that a resumed run schedules what it would have scheduled."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pipeline.config import Config, UserError
from pipeline.records import GroupSpec, TaskRef

STEPS = 100  # weights count to two decimals
LARGEST_WEIGHT = 100.0


@dataclass(frozen=True)
class Schedule:
    """Pass after pass over the tasks; in every pass each task moves on to the next harness of the cycle.

    Where ``weights`` differ, the cycle holds a harness as often as its weight says. In a pass tasks come in an order of
    its own in which the harnesses follow each other as in the cycle, so that every stretch of groups is mixed.
    """

    tasks: Sequence[TaskRef]
    harnesses: Sequence[str]
    group_size: int
    seed: int
    weights: Mapping[str, float] = field(default_factory=dict)
    _orders: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def horizon(self) -> int:
        """How many places are known so far: here all of them."""
        return sys.maxsize

    def group(self, index: int) -> GroupSpec:
        """The group at place ``index`` of the endless schedule."""
        pass_index, place = divmod(index, len(self.tasks))
        if pass_index not in self._orders:
            self._orders[pass_index] = self._order(pass_index)
        task_number = self._orders[pass_index][place]
        harness = self._harness(task_number + pass_index)
        return GroupSpec(f"g{index:06d}", self.tasks[task_number], harness, pass_index, self.group_size)

    @cached_property
    def cycle(self) -> tuple[str, ...]:
        """The harnesses in the order in which a task meets them. Raises UserError for a weight that cannot be."""
        return weighted_cycle(self.harnesses, self.weights)

    def _harness(self, turn: int) -> str:
        return self.cycle[turn % len(self.cycle)]

    def _order(self, pass_index: int) -> list[int]:
        """Task numbers: those of one harness change places among each other only."""
        places: dict[str, list[int]] = {}
        for number in range(len(self.tasks)):
            places.setdefault(self._harness(number + pass_index), []).append(number)
        order = list(range(len(self.tasks)))
        rng = random.Random(f"{self.seed}/{pass_index}")
        for own in places.values():
            shuffled = own.copy()
            rng.shuffle(shuffled)
            for place, number in zip(own, shuffled, strict=True):
                order[place] = number
        return order


def make_schedule(tasks: Sequence[TaskRef], config: Config) -> Schedule:
    """The schedule of a run over ``tasks`` without a curriculum."""
    return Schedule(tasks, config.mix.harnesses, config.algorithm.group_size, config.seed, config.mix.weights)


def weighted_cycle(harnesses: Sequence[str], weights: Mapping[str, float]) -> tuple[str, ...]:
    """The shortest sequence that holds each harness in proportion to its weight, spread as evenly as can be.

    Each harness gains its weight at every step; the one that is owed most comes next and pays the sum of all. With
    equal weights that is the harnesses in their order. Raises UserError for a weight that cannot be.
    """
    steps = [_steps(name, weights.get(name, 1.0)) for name in harnesses]
    shares = [step // math.gcd(*steps) for step in steps]
    owed, cycle = [0] * len(shares), []
    for _ in range(sum(shares)):
        owed = [have + share for have, share in zip(owed, shares, strict=True)]
        chosen = owed.index(max(owed))
        owed[chosen] -= sum(shares)
        cycle.append(harnesses[chosen])
    return tuple(cycle)


def _steps(name: str, weight: float) -> int:
    if not 1 / STEPS <= weight <= LARGEST_WEIGHT:
        raise UserError(
            f"mix.weights: {name} has {weight:g}; a weight is between {1 / STEPS:g} and {LARGEST_WEIGHT:g} "
            "(a harness that should not train is left out of mix.harnesses)"
        )
    return round(weight * STEPS)

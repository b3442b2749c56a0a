"""The schedule: rotation over passes, weights kept exactly, the same after a resume; the mixes that ship."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cli import compose_config
from pipeline.config import UserError
from pipeline.records import GroupSpec, TaskRef
from pipeline.stages.schedule import Schedule, weighted_cycle

TASKS = [TaskRef(f"t{i}", Path(f"/tasks/t{i}")) for i in range(7)]
TEN = (
    *("claude-code", "codex", "gemini-cli", "qwen-code", "opencode", "pi"),
    *("mini-swe-agent", "mistral-vibe", "openhands", "terminus-2"),
)  # fmt: skip


def one_pass(plan: Schedule, number: int) -> list[GroupSpec]:
    count = len(plan.tasks)
    return [plan.group(number * count + place) for place in range(count)]


def met(plan: Schedule, task: TaskRef, passes: int) -> list[str]:
    """The harness that a task meets in each pass."""
    return [next(g.harness for g in one_pass(plan, number) if g.task == task) for number in range(passes)]


def test_each_task_meets_the_harnesses_in_turn() -> None:
    plan = Schedule(TASKS, "abc", 4, seed=0)
    for number, task in enumerate(TASKS):
        assert met(plan, task, 6) == ["abc"[(number + turn) % 3] for turn in range(6)]


def test_every_pass_holds_every_task_once_in_an_order_of_its_own() -> None:
    plan = Schedule(TASKS, "abc", 4, seed=0)
    orders = [[group.task.task_id for group in one_pass(plan, number)] for number in range(4)]
    assert all(sorted(order) == [task.task_id for task in TASKS] for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    other = Schedule(TASKS, "abc", 4, seed=1)
    assert [group.task.task_id for group in one_pass(other, 0)] != orders[0]


def test_every_stretch_of_a_pass_is_mixed() -> None:
    plan = Schedule([TaskRef(f"t{i}", Path("/")) for i in range(96)], TEN, 4, seed=3)
    order = [group.harness for group in one_pass(plan, 2)]
    assert all(len(set(order[place : place + 10])) == 10 for place in range(87))


def test_weights_are_kept_exactly_by_every_task_and_in_every_pass() -> None:
    plan = Schedule(TASKS, ["pi", "codex", "vibe"], 4, 0, {"pi": 2, "codex": 0.5})  # 2 : 0.5 : 1
    assert len(plan.cycle) == len(TASKS) == 7
    for task in TASKS:
        assert Counter(met(plan, task, 14)) == {"pi": 8, "codex": 2, "vibe": 4}
    for number in range(14):
        assert Counter(g.harness for g in one_pass(plan, number)) == {"pi": 4, "codex": 1, "vibe": 2}


@given(st.lists(st.integers(1, 400), min_size=1, max_size=6))
def test_a_cycle_is_exact_and_even(steps: list[int]) -> None:
    names = [f"h{i}" for i in range(len(steps))]
    weights = {name: step / 100 for name, step in zip(names, steps, strict=True)}
    cycle = weighted_cycle(names, weights)
    counts, total = Counter(cycle), sum(steps)
    assert all(counts[name] * total == step * len(cycle) for name, step in zip(names, steps, strict=True))
    seen: Counter[str] = Counter()
    for length, name in enumerate(cycle, 1):
        seen[name] += 1
        ahead = max(abs(seen[n] - length * s / total) for n, s in zip(names, steps, strict=True))
        assert ahead < len(names), "no harness runs ahead of its share, or waits, by more than a round"


def test_equal_weights_are_no_weights() -> None:
    assert weighted_cycle("abc", {"a": 0.3, "b": 0.3, "c": 0.3}) == weighted_cycle("abc", {}) == ("a", "b", "c")


def test_the_heavy_one_is_spread() -> None:
    cycle = weighted_cycle(["a", "b", "c"], {"a": 2})
    assert sorted(cycle) == ["a", "a", "b", "c"] and all(x != y for x, y in pairwise(cycle))


@pytest.mark.parametrize("weight", [0.0, -1.0, 0.004, 101.0, float("nan")])
def test_a_weight_that_cannot_be_is_refused(weight: float) -> None:
    with pytest.raises(UserError, match=r"mix\.weights: b has"):
        weighted_cycle("ab", {"b": weight})


def test_a_group_is_the_same_however_it_is_reached() -> None:
    plan, again = (Schedule(TASKS, "abc", 4, 5, {"a": 3}) for _ in range(2))
    far = again.group(700)
    assert [plan.group(index) for index in range(701)][-1] == far and plan == again


def test_the_mixes_that_ship() -> None:
    assert compose_config([]).mix.harnesses == ["pi"]
    assert compose_config(["mix=four"]).mix.harnesses == ["opencode", "claude-code", "codex", "mini-swe-agent"]
    ten = compose_config(["+experiment=quickstart", "mix=ten", "reward=test", "training.updates=1"])
    assert tuple(ten.mix.harnesses) == TEN
    assert ten.algorithm.groups_per_update >= 10, "one update can hold a group of each"
    assert ten.training.updates == 1 and ten.reward.fn.endswith(":reward_for_tests")
    weighted = compose_config(["mix=four", "+mix.weights={codex: 2.5, claude-code: 1}"])
    assert weighted.mix.weights == {"codex": 2.5, "claude-code": 1.0}

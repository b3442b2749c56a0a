"""Drawing by difficulty: shares of harnesses, weights, no task left out, the same again after a kill."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.cli import compose_config
from pipeline.config import CurriculumConfig, UserError, check_curriculum
from pipeline.launch.draws import draw_until, keep, open_schedule
from pipeline.launch.run_directory import RunDirectory
from pipeline.records import TaskRef
from pipeline.stages.curriculum import Curriculum
from pipeline.stages.difficulty import Counted, Seen, count
from pipeline.stages.schedule import Schedule

FOUR = ("opencode", "claude-code", "codex", "mini-swe-agent")
SIZE = 8


def tasks(number: int) -> list[TaskRef]:
    return [TaskRef(f"t{i:03d}", Path(f"/tasks/t{i}")) for i in range(number)]


def run(plan: Curriculum, groups: int, solve: dict[str, float], counted: Counted) -> list[str]:
    """Task ids of the next ``groups`` places, when each task is solved as often as ``solve`` says (else one half)."""
    begun = plan.horizon
    while plan.horizon < begun + groups:
        start = plan.horizon
        plan.add(plan.draw(counted))
        for index in range(start, plan.horizon):
            spec = plan.group(index)
            share = solve.get(spec.task.task_id, 0.5)
            count(counted, spec.harness, spec.task.task_id, Seen(1, SIZE, SIZE * share, SIZE * share))
    return [plan.group(index).task.task_id for index in range(begun, plan.horizon)]


def test_harnesses_keep_their_shares_and_their_order() -> None:
    plain = Schedule(tasks(30), FOUR, SIZE, seed=3)
    plan = Curriculum(tasks(30), FOUR, SIZE, seed=3, block=24)
    run(plan, 240, {f"t{i:03d}": 0.0 for i in range(20)}, {})
    assert [plan.group(i).harness for i in range(240)] == [plain.group(i).harness for i in range(240)]
    assert Counter(plan.group(i).harness for i in range(240)) == dict.fromkeys(FOUR, 60)


def test_every_task_comes_once_before_any_comes_twice() -> None:
    plan = Curriculum(tasks(60), FOUR, SIZE, seed=0, block=12)
    assert sorted(run(plan, 60, {}, {})) == [task.task_id for task in tasks(60)]


def test_tasks_come_in_proportion_to_their_weight_and_none_starves() -> None:
    """Half of the tasks are always or never solved; they come as rarely as the floor says, and no more rarely."""
    hopeless = {f"t{i:03d}": float(i % 2) for i in range(20)}
    plan = Curriculum(tasks(40), FOUR, SIZE, seed=1, prior=4.0, floor=0.2, block=8)
    counted: Counted = {}
    run(plan, 600, hopeless, counted)  # until the prior hardly matters
    drawn = run(plan, 2400, hopeless, counted)
    times = Counter(drawn)
    rare = [times[name] for name in hopeless]
    often = [times[task.task_id] for task in plan.tasks if task.task_id not in hopeless]
    assert sum(rare) / sum(often) == pytest.approx(0.2, rel=0.05)
    assert min(rare) > 0.6 * sum(rare) / len(rare), "each of them, not some"
    longest = max(
        later - earlier
        for name in hopeless
        for places in [[place for place, drawn_name in enumerate(drawn) if drawn_name == name]]
        for earlier, later in pairwise(places)
    )
    assert longest < 1.5 * (20 + 20 * 0.2) / 0.2, "and none is away for long"


def test_a_task_meets_every_harness() -> None:
    plan = Curriculum(tasks(16), FOUR, SIZE, seed=2, block=8)
    run(plan, 16 * 12, {}, {})
    met = Counter((plan.group(i).task.task_id, plan.group(i).harness) for i in range(16 * 12))
    assert len(met) == 16 * 4 and min(met.values()) >= 1 and max(met.values()) <= 6


def test_weights_by_hand() -> None:
    plan = Curriculum(tasks(1), FOUR, SIZE, seed=0, prior=4.0, floor=0.1)
    assert plan.weight(Seen()) == 1.0, "unknown is as good as one half"
    assert plan.weight(Seen(rollouts=8, correctness=8.0)) == pytest.approx(4 * (10 / 12) * (2 / 12))
    assert plan.weight(Seen(rollouts=8, correctness=0.0)) == pytest.approx(4 * (10 / 12) * (2 / 12))
    assert plan.weight(Seen(rollouts=8, correctness=2.0)) == pytest.approx(4 * (4 / 12) * (8 / 12))
    assert plan.weight(Seen(rollouts=800, correctness=800.0)) == 0.1


def test_a_pass_counts_how_often_the_task_came() -> None:
    plan = Curriculum(tasks(3), ("a", "b"), SIZE, seed=0, block=100)
    run(plan, 12, {}, {})
    specs = [plan.group(index) for index in range(plan.horizon)]
    assert all(
        spec.pass_index == sum(earlier.task == spec.task for earlier in specs[:place])
        for place, spec in enumerate(specs)
    )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), number=st.integers(1, 40), block=st.integers(1, 30), solved=st.floats(0, 1))
def test_any_sizes_give_whole_blocks(seed: int, number: int, block: int, solved: float) -> None:
    plan = Curriculum(tasks(number), FOUR, SIZE, seed, block=block)
    counted: Counted = {}
    first = plan.draw(counted)
    assert len(first) == len({task_id for task_id, _ in first}) == min(number, block) and plan.draw(counted) == first, (
        "nothing is changed"
    )
    again = Curriculum(tasks(number), FOUR, SIZE, seed, block=block)
    for _ in range(10):
        drawn = plan.draw(counted)
        assert again.draw(counted) == drawn, "the same blocks and figures draw the same"
        for schedule in (plan, again):
            schedule.add(drawn)
        for task_id, _ in drawn:
            count(counted, "a", task_id, Seen(1, SIZE, SIZE * solved, 1.0))


# --- in the run directory


def config(*words: str) -> Any:
    return compose_config(
        ["mix=four", "curriculum=difficulty", "algorithm.groups_per_update=2", "algorithm.group_size=4", *words]
    )


def test_what_was_drawn_outlives_a_kill_whatever_the_figures_are_then(tmp_path: Path) -> None:
    place, counted = RunDirectory(tmp_path), Counted()
    first = open_schedule(tasks(20), config(), place)
    draw_until(first, counted, 20, place)
    for index in range(20):
        spec = first.group(index)
        count(counted, spec.harness, spec.task.task_id, Seen(1, 4, 4.0 * (index % 2), 1.0))
    draw_until(first, counted, 60, place)
    specs = [first.group(index) for index in range(first.horizon)]
    resumed = open_schedule(tasks(20), config(), place, needed=60)
    assert [resumed.group(index) for index in range(resumed.horizon)] == specs
    draw_until(first, counted, 100, place)
    draw_until(resumed, {}, 100, place)  # a ghost and its successor, which went back to an older checkpoint
    assert [resumed.group(index) for index in range(100)] == [first.group(index) for index in range(100)]


def test_whoever_draws_second_takes_what_the_first_drew(tmp_path: Path) -> None:
    place = RunDirectory(tmp_path)
    one, other = (open_schedule(tasks(20), config(f"seed={seed}"), place) for seed in (1, 2))
    assert isinstance(one, Curriculum) and isinstance(other, Curriculum) and one.draw({}) != other.draw({})
    kept = keep(one.draw({}), one, place)
    assert keep(other.draw({}), other, place) == kept == one.draw({})


def test_a_missing_or_strange_block_is_told(tmp_path: Path) -> None:
    place = RunDirectory(tmp_path)
    schedule = open_schedule(tasks(20), config(), place)
    draw_until(schedule, {}, 20, place)
    with pytest.raises(UserError, match="is missing"):
        open_schedule(tasks(20), config(), place, needed=200)
    with pytest.raises(UserError, match="not among its tasks any more"):
        open_schedule(tasks(3), config(), place)
    next(place.curriculum.iterdir()).write_text(json.dumps([["t000", 1.0]])[:8])
    with pytest.raises(UserError, match="damaged"):
        open_schedule(tasks(20), config(), place)


def test_without_a_curriculum_nothing_is_drawn(tmp_path: Path) -> None:
    place = RunDirectory(tmp_path)
    plain = open_schedule(tasks(20), compose_config(["mix=four"]), place, needed=10**6)
    draw_until(plain, {}, 10**6, place)
    assert type(plain) is Schedule and not place.curriculum.exists()


@pytest.mark.parametrize(
    ("floor", "prior"), [(0.0, 1.0), (1.5, 1.0), (0.1, 0.0), (0.1, float("inf")), (float("nan"), 1.0)]
)
def test_wrong_numbers_are_refused(floor: float, prior: float) -> None:
    with pytest.raises(UserError, match="curriculum"):
        check_curriculum(CurriculumConfig(True, prior, floor))

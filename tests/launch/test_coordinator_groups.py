"""Closed groups at the coordinator: reward functions that fail, groups that are counted, groups that are refused."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cli import compose_config
from pipeline.launch.coordinator import REWARD_FAILURES, Coordinator
from pipeline.launch.run_directory import RunDirectory
from pipeline.records import Outcome, PolicyVersion, RolloutRecord, TaskRef, Verdict
from pipeline.stages.flow import FlowState, GroupFlow
from pipeline.stages.schedule import make_schedule

SIZE = 4
REWARDS: dict[str, Callable[[RolloutRecord], object]] = {}


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    """One whose reward is whatever the test puts into REWARDS, with an engine that may be given groups."""
    module = types.ModuleType("rewards_of_this_test")
    module.f = lambda outcome: REWARDS["f"](outcome)  # type: ignore[attr-defined]
    sys.modules["rewards_of_this_test"] = module
    words = f"mix.harnesses=[pi] algorithm.group_size={SIZE} reward.fn=rewards_of_this_test:f"
    config = compose_config(words.split())
    tasks = [TaskRef(f"t{number}", Path(f"t{number}")) for number in range(40)]
    flow = GroupFlow(make_schedule(tasks, config), config.algorithm, 40, FlowState(), 1)
    coordinator = Coordinator(config, RunDirectory(tmp_path).new_attempt(), flow)
    coordinator.register("node0", "", "")
    coordinator.set_weights(coordinator.engines["node0"], "1.0")
    coordinator.set_phase("train")
    yield coordinator
    coordinator.stop()
    del sys.modules["rewards_of_this_test"]


FIRST = PolicyVersion(1, 0)


def close_one(coordinator: Coordinator, correctness: float | None = 1.0, version: PolicyVersion = FIRST) -> str:
    """The next group comes back whole; returns its id."""
    work = coordinator.lease("node0", 0.0)["work"]
    outcome = Outcome.SOLVED if correctness is not None else Outcome.INFRASTRUCTURE
    coordinator.take_back(
        "node0", work,
        tuple(
            RolloutRecord(
                f"r{index}", work["group_id"], index, work["task_id"], "pi", outcome,
                Verdict(None, correctness, 1), (), version, version, 1, 0, 0, 1, 1, 1.0,
            )
            for index in range(SIZE)
        ),
    )  # fmt: skip
    return str(work["group_id"])


def fail(outcome: RolloutRecord) -> float:
    raise KeyError("price")


def alarms(coordinator: Coordinator) -> list[str]:
    return [error["text"] for error in coordinator.errors]


def test_a_reward_function_that_fails_now_and_then_costs_its_rollouts_only(coordinator: Coordinator) -> None:
    REWARDS["f"] = lambda outcome: fail(outcome) if outcome.index == 0 else float(outcome.index)
    for _ in range(2 * REWARD_FAILURES):
        close_one(coordinator)
    flow = coordinator.flow
    assert flow is not None and coordinator.failure is None
    assert {len(ready.group.rollouts) for ready in flow.ready} == {SIZE - 1}
    assert {sum(ready.group.advantages) for ready in flow.ready} == {0.0}
    assert len(alarms(coordinator)) == 1 and "KeyError: 'price'" in alarms(coordinator)[0], "one alarm, with the cause"
    failed = [r for r in coordinator.progress.records if "reward_failed" in r.info]
    assert len(failed) == 2 * REWARD_FAILURES and {r.verdict.reward for r in failed} == {None}


def test_a_reward_function_that_always_fails_ends_the_run(coordinator: Coordinator) -> None:
    """After so many groups in a row; one that comes through, or one that could not be rewarded, changes the count."""
    REWARDS["f"] = fail
    close_one(coordinator)
    close_one(coordinator, correctness=None)
    close_one(coordinator)
    assert coordinator.failure is None
    REWARDS["f"] = lambda outcome: float(outcome.index)
    close_one(coordinator)
    REWARDS["f"] = fail
    for _ in range(REWARD_FAILURES):
        assert coordinator.failure is None
        close_one(coordinator)
    assert coordinator.mistake and coordinator.failure is not None
    assert "rewards_of_this_test:f failed on every rollout of 3 groups in a row: KeyError" in coordinator.failure


def test_a_group_that_the_function_leaves_out_is_rolled_again(coordinator: Coordinator) -> None:
    REWARDS["f"] = fail
    group = close_one(coordinator)
    flow = coordinator.flow
    assert flow is not None and flow.rerolls == {group: 1}
    again = coordinator.lease("node0", 0.0)["work"]
    assert again["group_id"] == group, "it is the next one"


def test_a_group_above_the_bound_is_refused_whatever_is_said_of_it(coordinator: Coordinator) -> None:
    """Its version in the queue is wrong; its rollouts tell. The others of its batch are trained."""
    REWARDS["f"] = lambda outcome: float(outcome.index)
    flow = coordinator.flow
    assert flow is not None
    old = close_one(coordinator)
    flow.version = PolicyVersion(1, flow.algorithm.max_staleness + 1)
    coordinator.set_weights(coordinator.engines["node0"], str(flow.version))
    flow.ready = [replace(ready, version=flow.version) for ready in flow.ready]
    count = flow.algorithm.groups_per_update
    for _ in range(count):
        close_one(coordinator, version=flow.version)
    assert coordinator.take_batch() is None and old not in {ready.group.group_id for ready in flow.ready}
    assert flow.dropped_stale == 1 and len(alarms(coordinator)) == 1 and old in alarms(coordinator)[0]
    batch = coordinator.take_batch()
    assert batch is not None and len(batch) == count and max(flow.staleness(batch)) == 0
    assert coordinator.lease("node0", 0.0)["work"]["group_id"] == old, "it is rolled out again"


def test_groups_without_contrast_are_counted(coordinator: Coordinator) -> None:
    REWARDS["f"] = lambda outcome: 1.0
    for _ in range(3):
        close_one(coordinator)
    assert coordinator.progress.no_contrast == 3 and coordinator.finish_update([]).no_contrast == 3
    assert coordinator.progress.no_contrast == 0

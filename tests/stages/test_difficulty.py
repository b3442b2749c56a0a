"""Figures of tasks and harnesses by hand: what is counted, what is not, and what a report shows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pipeline.records import Outcome, PolicyVersion, RolloutRecord, Verdict
from pipeline.stages.difficulty import Counted, Seen, by_harness, by_task, count, report, seen_in


def rollout(reward: float | None, correctness: float | None = None, version: str = "1.0") -> RolloutRecord:
    known = PolicyVersion.parse(version)
    solved = reward if correctness is None else correctness
    return RolloutRecord(
        "r", "g", 0, "t", "a", Outcome.SOLVED, Verdict(reward, solved, 1), (), known, known, 1, 0, 0, 1, 1, 0.1
    )


def test_a_group_by_hand() -> None:
    records = [
        rollout(1.1, 1.0, "1.2"),
        rollout(0.0, 0.0, "1.3"),
        rollout(None, 1.0, "2.3"),
        rollout(0.55, 0.5, "1.10"),
    ]
    seen = seen_in(records, contrast=True)
    assert seen == Seen(1, 3, 1.5, pytest.approx(1.65), 0, 0, "1.10"), "graded ones only; 10 comes after 3"
    assert seen_in([], contrast=False) == Seen(groups=1, no_contrast=1)


def test_cells_add_up_to_tasks_and_harnesses() -> None:
    counted: Counted = {}
    right, wrong = rollout(1.0, version="1.1"), rollout(0.0, version="1.2")
    count(counted, "a", "x", seen_in([right, wrong], contrast=True))
    count(counted, "a", "x", seen_in([right, right], contrast=False))
    count(counted, "b", "x", seen_in([wrong, wrong], contrast=False))
    count(counted, "b", "y/z", Seen(abandoned=1))
    assert by_task(counted) == {"x": Seen(3, 6, 3.0, 3.0, 2, 0, "1.2"), "y/z": Seen(abandoned=1)}
    assert by_harness(counted)["b"] == Seen(1, 2, 0.0, 0.0, 1, 1, "1.2")
    shown = report(json.loads(json.dumps(counted)), update=7)
    assert shown["update"] == 7 and shown["harnesses"]["a"]["pass_rate"] == 0.75
    assert shown["tasks"]["x"]["harnesses"]["a"]["groups"] == 2
    assert shown["tasks"]["x"]["pass_rate"] == shown["tasks"]["x"]["mean_reward"] == 0.5
    assert shown["tasks"]["y/z"] == {
        **dict.fromkeys(("groups", "rollouts", "no_contrast"), 0), **dict.fromkeys(("pass_rate", "mean_reward")),
        "abandoned": 1, "last_version": None,
        "harnesses": {"b": shown["harnesses"]["b"] | {"groups": 0, "rollouts": 0, "no_contrast": 0, "pass_rate": None,
                                                       "mean_reward": None, "last_version": None}},
    }  # fmt: skip


def test_what_a_checkpoint_holds_is_not_changed_by_what_comes_later() -> None:
    counted: Counted = {}
    count(counted, "a", "x", seen_in([rollout(1.0)], contrast=False))
    held = dict(counted)  # as FlowState.to_json copies it
    count(counted, "a", "x", seen_in([rollout(1.0)], contrast=False))
    assert Seen(*held["a/x"]).groups == 1 and Seen(*counted["a/x"]).groups == 2


def test_rewards_of_any_size_leave_the_share_of_solved_ones_alone() -> None:
    seen = seen_in([replace(rollout(-3.0), verdict=Verdict(-3.0, 1.0, 1))], contrast=True)
    assert (seen.reward, seen.correctness) == (-3.0, 1.0)

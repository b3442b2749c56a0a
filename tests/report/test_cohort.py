"""What two evaluations have in common, and what a comparison must say of what they have not."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.report.cohort import Comparison, compare_cohorts

COHORT: dict[str, Any] = {
    "tasks": {name: {"content": "c", "grader": "g", "difficulty": None} for name in ("a", "b")},
    "harnesses": {"pi": "1", "codex": "2"},
    "limits": {"max_tokens": 4096, "temperature": 1.0},
    "rollouts_per_task": 2,
}
OTHER = {"content": "d", "grader": "g"}


@pytest.mark.parametrize(
    ("change", "said", "headline"),
    [
        ({"tasks": COHORT["tasks"] | {"b": OTHER}}, "tasks differ: 1 of 2, the first is b", False),
        ({"tasks": COHORT["tasks"] | {"c": OTHER}}, "tasks differ: 1 of 3, the first is c", False),
        (
            {"tasks": {name: {"content": "c", "grader": "h"} for name in ("a", "b")}},
            "graders differ: 2 of 2, the first is a",
            False,
        ),
        ({"harnesses": {"pi": "1.1", "codex": "2"}}, "pi ran at version 1, then 1.1", True),
        ({"limits": COHORT["limits"] | {"max_tokens": 16384}}, "max_tokens was 4096, then 16384", True),
        ({"rollouts_per_task": 1}, "rollouts a task: 2, then 1", True),
    ],
)
def test_what_differs_is_said(change: dict[str, Any], said: str, headline: bool) -> None:
    assert compare_cohorts(COHORT, COHORT | change) == Comparison(False, (said,), headline)


def test_equal_ones_are_comparable_whatever_else_one_of_them_knows() -> None:
    more = COHORT | {"harnesses": {"pi": "1", "vibe": "9"}, "limits": COHORT["limits"] | {"new": 1}, "sha256": "x"}
    assert compare_cohorts(COHORT, more) == Comparison(True, (), True)


def test_of_an_older_run_nothing_is_claimed() -> None:
    assert compare_cohorts(None, COHORT) == compare_cohorts(COHORT, None) == Comparison(None, (), True)

"""pass@k against counting all draws, and the rates of how rollouts ended against hand computation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from statistics import fmean
from typing import Any

import pytest

from pipeline.records import Outcome, RolloutRecord
from pipeline.report.measures import evaluation_metrics, pass_at, pass_at_k, rates, retries

Make = Callable[..., RolloutRecord]


@pytest.mark.parametrize(("n", "k"), [(n, k) for n in range(1, 8) for k in range(1, n + 1)])
def test_pass_at_k_is_the_share_of_draws_with_a_solved_one(n: int, k: int) -> None:
    for c in range(n + 1):
        draws = list(combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(fmean(map(any, draws)))


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_pass_at_k_is_unbiased(chance: float) -> None:
    """Over everything that n rollouts can give, weighted by how likely it is, it is 1 − (1 − p)^k."""
    n = 6
    for k in range(1, n + 1):
        expected = sum(
            chance ** sum(won) * (1 - chance) ** (n - sum(won)) * pass_at_k(n, sum(won), k)
            for won in product((0, 1), repeat=n)
        )
        assert expected == pytest.approx(1 - (1 - chance) ** k)


@pytest.mark.parametrize(("n", "c", "k"), [(2, 3, 1), (2, -1, 1), (2, 1, 3), (2, 1, 0)])
def test_what_cannot_be_drawn_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, c, k)


def test_pass_at_is_the_mean_over_tasks_and_harnesses(rollout: Make) -> None:
    outcomes = {"a": [True, False, False, False], "b": [True, True, True, True], "c": [False] * 4}
    records = [rollout(task, passed=won, index=i) for task, own in outcomes.items() for i, won in enumerate(own)]
    assert pass_at(records) == pytest.approx({"1": 5 / 12, "2": (0.5 + 1 + 0) / 3, "4": 2 / 3})
    ungraded = [replace(rollout("b", "codex", None), index=i) for i in range(4)]
    assert pass_at([*records, *ungraded]) == pass_at(records), "what has no grade is no failure"
    lone = [rollout("d", passed=True)]
    assert pass_at([*records, *lone])["2"] == pass_at(records)["2"], "one rollout says nothing about two"
    assert pass_at(lone) == {"1": 1.0} and pass_at(ungraded) == {}


def ended(record: RolloutRecord, outcome: Outcome, **info: Any) -> RolloutRecord:
    return replace(record, outcome=outcome, info={"unless_solved": outcome.value, "cut": 0, "returncode": 0} | info)


def test_rates_of_how_rollouts_ended(rollout: Make) -> None:
    fail = {"passed": False}
    solved_late = replace(ended(rollout("a"), Outcome.AGENT_TIMEOUT), outcome=Outcome.SOLVED)
    records = [
        solved_late,  # its own time limit, after the work was done
        ended(rollout("b", calls=5, **fail), Outcome.AGENT_TIMEOUT, cut=2),
        ended(rollout("c", calls=1, **fail), Outcome.UNSOLVED, cut=1),
        ended(rollout("d", **fail), Outcome.UNSOLVED, returncode=1),
        ended(rollout("e", **fail), Outcome.UNSOLVED, returncode=1, context_full=1),
        ended(rollout("f", **fail), Outcome.CALL_BUDGET),
        ended(rollout("g", **fail), Outcome.AGENT_CRASH),
        ended(rollout("h", **fail), Outcome.LOOP_GUARD),
        replace(ended(rollout("i"), Outcome.UNSOLVED), outcome=Outcome.SOLVED),
        ended(rollout("j", passed=None, calls=90), Outcome.INFRASTRUCTURE, cut=5),
    ]
    found = rates(records)
    assert found["truncation_rate"] == pytest.approx(2 / 9)
    assert found["timeout_rate"] == pytest.approx(2 / 9)
    assert found["submission_rate"] == pytest.approx(3 / 9), "c, d and i"
    assert found["calls"] == pytest.approx((2 + 5 + 1 + 6 * 2) / 9)
    values = evaluation_metrics(records)
    assert {name: values[f"eval/{name}"] for name in found} == pytest.approx(found)
    assert values["eval/pi/timeout_rate"] == found["timeout_rate"]


def test_rates_of_nothing_are_not_known(rollout: Make) -> None:
    assert set(rates([rollout("a", passed=None)]).values()) == {None}
    assert rates([rollout("a")])["truncation_rate"] is None, "a record without it does not say that nothing was cut"


def test_retries_are_counted_with_their_causes(rollout: Make) -> None:
    def tried(index: int, passed: bool | None, *causes: str, cause: str = "") -> RolloutRecord:
        info = {"tries": len(causes) + 1, "failures": ["…"] * len(causes), "causes": list(causes)}
        record = rollout("a", passed=passed, index=index)
        return replace(record, info=info | ({"cause": cause} if cause else {}))

    first = [tried(0, True), tried(1, True, "engine"), tried(2, None, "engine", cause="sandbox")]
    assert retries([tried(0, True)]) == {"rollouts": 0, "tries": 1, "causes": {}, "cells": {}}
    again = tried(2, False)
    counted = {"tries": 6, "causes": {"engine": 2, "sandbox": 1}}
    assert retries([*first, again]) == {"rollouts": 2, **counted, "cells": {"pi--a": counted}}
    old = replace(again, info={"tries": 2, "failures": ["the engine did not answer"]})
    assert retries([old])["causes"] == {"not recorded": 1}

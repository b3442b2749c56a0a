"""Intervals and tests against closed formulas and against an independent resampling."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.report.statistics import Cell, Difference, mcnemar, paired_bootstrap, wilson


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_the_closed_formula(case: tuple[int, int]) -> None:
    k, n = case
    z, p = 1.959963984540054, k / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert wilson(k, n) == pytest.approx((centre - half, centre + half), abs=1e-9)


@pytest.mark.parametrize(("k", "n"), [(3, 2), (0, 0), (-1, 5)])
def test_wilson_refuses_impossible_counts(k: int, n: int) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        wilson(k, n)


def simulated(tasks: int, harnesses: list[str], rise: float) -> tuple[dict[Cell, list[float]], dict[Cell, list[float]]]:
    rng = np.random.default_rng(5)
    before: dict[Cell, list[float]] = {}
    after: dict[Cell, list[float]] = {}
    for task in range(tasks):
        ease = rng.random()
        for harness in harnesses[: 1 + task % len(harnesses)]:
            before[f"t{task}", harness] = [float(x) for x in rng.random(2) < 0.5 * ease]
            after[f"t{task}", harness] = [float(x) for x in rng.random(2) < min(1.0, 0.5 * ease + rise)]
    return before, after


def test_the_bootstrap_agrees_with_plain_resampling_of_tasks() -> None:
    before, after = simulated(80, ["a", "b"], 0.3)
    by_task: dict[str, list[float]] = {}
    for cell in before:
        by_task.setdefault(cell[0], []).append(np.mean(after[cell]) - np.mean(before[cell]))
    names, rng = list(by_task), np.random.default_rng(99)
    draws = []
    for _ in range(4000):
        picked = [value for name in rng.choice(names, len(names)) for value in by_task[name]]
        draws.append(np.mean(picked))
    found = paired_bootstrap(before, after, seed=1)
    assert found is not None
    assert found.diff == pytest.approx(np.mean([value for own in by_task.values() for value in own]))
    assert (found.lo, found.hi) == pytest.approx(np.percentile(draws, [2.5, 97.5]), abs=0.012)
    assert found.pairs == 120


def test_cells_of_one_task_are_not_taken_for_independent() -> None:
    rng = np.random.default_rng(3)
    change = {f"t{task}": float(rng.integers(0, 2)) for task in range(60)}
    one = {(task, "a"): [0.0] for task in change}
    many = {(task, harness): [0.0] for task in change for harness in "abcd"}
    narrow = paired_bootstrap(one, {cell: [change[cell[0]]] for cell in one})
    wide = paired_bootstrap(many, {cell: [change[cell[0]]] for cell in many})
    assert narrow is not None and wide is not None
    assert wide.hi - wide.lo == pytest.approx(narrow.hi - narrow.lo, rel=0.1)


def test_the_bootstrap_repeats_with_its_seed() -> None:
    before, after = simulated(30, ["a"], 0.2)
    assert paired_bootstrap(before, after, seed=4) == paired_bootstrap(before, after, seed=4)
    assert paired_bootstrap(before, after, seed=4) == paired_bootstrap(dict(reversed(before.items())), after, seed=4)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng, covered = np.random.default_rng(11), 0
    for trial in range(200):
        before = {(f"t{task}", "a"): [float(rng.random() < 0.4)] for task in range(60)}
        after = {cell: [float(rng.random() < 0.6)] for cell in before}
        found = paired_bootstrap(before, after, seed=trial, resamples=400)
        assert found is not None
        covered += found.lo <= 0.2 <= found.hi
    assert 0.89 <= covered / 200 <= 0.99


def test_only_cells_of_both_sides_count() -> None:
    before = {("t1", "a"): [0.0], ("t2", "a"): [], ("t3", "a"): [1.0], ("t4", "a"): [0.0]}
    after = {("t1", "a"): [1.0], ("t2", "a"): [1.0], ("t4", "a"): [1.0]}
    assert paired_bootstrap(before, after) == Difference(1.0, 1.0, 1.0, 2)
    assert paired_bootstrap({("t", "a"): [0.0, 1.0]}, {("t", "a"): [1.0, 1.0]}) == Difference(0.5, 0.5, 0.5, 1)
    assert paired_bootstrap(before, {}) is None


def test_the_interval_leans_with_skewed_data() -> None:
    before = {(f"t{task}", "a"): [0.0] for task in range(12)}
    after = before | {("t0", "a"): [1.0]}
    found = paired_bootstrap(before, after)
    assert found is not None
    assert (found.lo, found.hi) == pytest.approx((0.0, 0.25))


def test_mcnemar_is_the_exact_binomial_tail() -> None:
    before = [False] * 9 + [True] * 2 + [True] * 30
    after = [True] * 9 + [False] * 2 + [True] * 30
    tail = sum(math.comb(11, k) for k in range(3)) / 2**11
    assert mcnemar(before, after) == pytest.approx(2 * tail)
    assert mcnemar(after, before) == pytest.approx(2 * tail)
    assert mcnemar([True, False], [True, False]) == 1.0
    with pytest.raises(ValueError, match="shorter"):
        mcnemar([True, False], [True])


def test_the_sentence() -> None:
    sentence = Difference(0.32, 0.2411, 0.3989, 200).sentence()
    assert sentence == "+32.0 points, 95% interval 24.1 to 39.9, n = 200 pairs"
    assert Difference(-0.05, -0.1, 0.0, 8).sentence().startswith("-5.0 points, 95% interval -10.0 to 0.0")

"""Intervals and tests against closed formulas and against an independent resampling."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from pipeline.report.statistics import Cell, Difference, Flips, Savings, flips, paired_bootstrap, savings, trend, wilson


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
    rng, found = np.random.default_rng(11), []
    for trial in range(200):
        before = {(f"t{task}", "a"): [float(rng.random() < 0.4)] for task in range(60)}
        after = {cell: [float(rng.random() < 0.6)] for cell in before}
        found.append(paired_bootstrap(before, after, seed=trial, resamples=400))
    assert least(200) <= covered(0.2, found) <= 198


def test_only_cells_of_both_sides_count() -> None:
    before = {("t1", "a"): [0.0], ("t2", "a"): [], ("t3", "a"): [1.0], ("t4", "a"): [0.0]}
    after = {("t1", "a"): [1.0], ("t2", "a"): [1.0], ("t4", "a"): [1.0]}
    assert paired_bootstrap(before, after) == Difference(1.0, 1.0, 1.0, 2)
    assert paired_bootstrap({("t", "a"): [0.0, 1.0]}, {("t", "a"): [1.0, 1.0]}) == Difference(0.5, 0.5, 0.5, 1)
    assert paired_bootstrap(before, {}) is None


def test_where_every_task_changed_alike_there_is_no_interval() -> None:
    one = paired_bootstrap({("t", "a"): [0.0]}, {("t", "a"): [1.0]})
    same = paired_bootstrap({(f"t{n}", "a"): [1.0] for n in range(9)}, {(f"t{n}", "a"): [1.0] for n in range(9)})
    assert one is not None and same is not None and not one.known and not same.known
    assert one.sentence() == "+100.0 points, n = 1 pair (every task changed alike, so there is no interval)"
    assert same.sentence() == "+0.0 points, n = 9 pairs (every task changed alike, so there is no interval)"
    two = paired_bootstrap({("t", "a"): [0.0], ("u", "a"): [0.0]}, {("t", "a"): [1.0], ("u", "a"): [0.0]})
    assert two == Difference(0.5, 0.0, 1.0, 2) and two.known


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
    assert flips(before, after) == Flips(9, 2, 41, pytest.approx(2 * tail))
    assert flips(after, before) == Flips(2, 9, 41, pytest.approx(2 * tail))
    assert flips([True, False], [True, False]) == Flips(0, 0, 2, 1.0)
    assert flips([], []) == Flips(0, 0, 0, 1.0)
    with pytest.raises(ValueError, match="shorter"):
        flips([True, False], [True])


def test_flips_as_a_sentence() -> None:
    assert Flips(9, 2, 41, 0.0654).sentence() == "9 newly solved, 2 no longer (of 41, McNemar p = 0.065)"
    assert Flips(1234, 6, 2000, 1e-30).sentence() == "1,234 newly solved, 6 no longer (of 2,000, McNemar p < 0.001)"


def test_the_sentence() -> None:
    sentence = Difference(0.32, 0.2411, 0.3989, 200).sentence()
    assert sentence == "+32.0 points, 95% interval 24.1 to 39.9, n = 200 pairs"
    assert Difference(-0.05, -0.1, 0.0, 8).sentence().startswith("-5.0 points, 95% interval -10.0 to 0.0")


@pytest.mark.parametrize(
    ("k", "n", "interval"),
    [(81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)), (0, 20, (0.0, 0.1611)), (1, 29, (0.0061, 0.1718))],
)
def test_wilson_gives_newcombes_table(k: int, n: int, interval: tuple[float, float]) -> None:
    """The four examples of Newcombe (1998), method 3."""
    assert wilson(k, n) == pytest.approx(interval, abs=5e-5)


def test_mcnemar_on_known_data() -> None:
    """Agresti's table of approval (Categorical Data Analysis, 10.1): 150 against 86 changed their minds, z² = 17.36."""
    pairs = [(True, True)] * 794 + [(True, False)] * 150 + [(False, True)] * 86 + [(False, False)] * 570
    p = flips(*zip(*pairs, strict=True)).p
    assert p == pytest.approx(2 * stats.binom.cdf(86, 236, 0.5))
    assert p == pytest.approx(stats.chi2.sf(17.36, 1), rel=0.5)


def test_the_bootstrap_agrees_with_scipys_interval_of_a_mean() -> None:
    before, after = simulated(400, ["a"], 0.3)
    change = [np.mean(after[cell]) - np.mean(before[cell]) for cell in before]
    interval = stats.ttest_1samp(change, 0.0).confidence_interval(0.95)
    found = paired_bootstrap(before, after)
    assert found is not None
    assert (found.lo, found.hi) == pytest.approx((interval.low, interval.high), abs=0.004)


def covered(truth: float, found: list[Difference | None]) -> int:
    return sum(change.lo <= truth <= change.hi for change in found if change is not None)


def least(trials: int) -> int:
    """Of so many 95% intervals, fewer than this hold the truth once in 10,000 times."""
    return int(stats.binom.ppf(1e-4, trials, 0.95))


def shared_effect(seed: int) -> tuple[dict[Cell, list[float]], dict[Cell, list[float]]]:
    """60 tasks in four harnesses; one in five is learnt, and then in all four."""
    rng = np.random.default_rng(seed)
    learnt = [float(rng.random() < 0.2) for _ in range(60)]
    cells = [(task, harness) for task in range(60) for harness in "abcd"]
    return {(f"t{t}", h): [0.0] for t, h in cells}, {(f"t{t}", h): [learnt[t]] for t, h in cells}


def test_the_interval_covers_where_the_harnesses_of_a_task_share_its_effect() -> None:
    """An interval that took the 240 cells for independent would be half as wide, and hold the truth in two of three."""
    found = [paired_bootstrap(*shared_effect(seed), seed=seed, resamples=400) for seed in range(150)]
    assert covered(0.2, found) >= least(150) - 3, "with 60 tasks a percentile interval is a little narrow"


HARNESS_EFFECTS = {"opencode": 0.20, "claude-code": 0.12, "codex": 0.14, "mini-swe-agent": 0.02}  # mean 0.12


def cohort(seed: int, share: float = 1.0) -> tuple[dict[Cell, list[float]], dict[Cell, list[float]]]:
    """250 tasks in four harnesses, once before and once after training that adds a share of HARNESS_EFFECTS to each."""
    rng = np.random.default_rng(seed)
    before: dict[Cell, list[float]] = {}
    after: dict[Cell, list[float]] = {}
    for task in range(250):
        ease = 0.8 * rng.beta(1.0, 1.0)
        for harness, effect in HARNESS_EFFECTS.items():
            before[f"t{task}", harness] = [float(rng.random() < ease)]
            after[f"t{task}", harness] = [float(rng.random() < ease + share * effect)]
    return before, after


def test_a_cohort_with_a_known_effect() -> None:
    found = [paired_bootstrap(*cohort(seed), seed=seed, resamples=500) for seed in range(40)]
    assert covered(0.12, found) >= least(40)
    assert all(change is not None and change.lo > 0.0 for change in found), "an effect of this size is always seen"
    assert np.mean([change.diff for change in found if change is not None]) == pytest.approx(0.12, abs=0.01)
    assert found[0] is not None and found[0].sentence().endswith("n = 1,000 pairs")


def test_a_cohort_without_an_effect() -> None:
    cohorts = [cohort(seed, share=0.0) for seed in range(60)]
    found = [paired_bootstrap(*sides, seed=seed, resamples=500) for seed, sides in enumerate(cohorts)]
    assert covered(0.0, found) >= least(60)
    p = [flips(*outcomes(*sides)).p for sides in cohorts]
    assert sum(value <= 0.05 for value in p) <= 60 - least(60) and min(p) > 1e-5


def test_before_and_after_exchanged_change_the_sign_and_nothing_else() -> None:
    before, after = cohort(3)
    there, back = paired_bootstrap(before, after), paired_bootstrap(after, before)
    assert there is not None and back is not None
    assert (back.diff, back.lo, back.hi) == pytest.approx((-there.diff, -there.hi, -there.lo), abs=1e-9)
    won, lost = flips(*outcomes(before, after)), flips(*outcomes(after, before))
    assert (won.won, won.lost, won.p) == (lost.lost, lost.won, lost.p) and won.p < 1e-5
    assert (won.won - won.lost) / won.pairs == pytest.approx(there.diff), "both count the same pairs"


def outcomes(before: dict[Cell, list[float]], after: dict[Cell, list[float]]) -> tuple[list[bool], list[bool]]:
    return [before[cell] == [1.0] for cell in before], [after[cell] == [1.0] for cell in before]


def test_savings_by_hand() -> None:
    assert savings([(10, 5), (4, 3), (6, 6)]) == Savings(pytest.approx(30.0), 20, 14, 3)
    assert savings([(10, 12)]).percent == pytest.approx(-20.0)
    assert savings([]).percent is None and savings([(0, 3)]).percent is None


def test_savings_weigh_pairs_by_their_calls() -> None:
    """The formula is a ratio of sums, not a mean of ratios: a pair with many calls counts more."""
    assert savings([(100, 50), (2, 2)]).percent == pytest.approx(100 * 50 / 102)


def test_savings_as_a_sentence() -> None:
    said = savings([(8000, 5500), (120, 95)]).sentence()
    assert said == "31.1% fewer tool calls (8,120 → 5,595) where both solved the task, n = 2"
    assert savings([(10, 11)]).sentence().startswith("10.0% more tool calls (10 → 11)")
    assert savings([]).sentence() == "tool calls saved: not known, n = 0 rollouts solved by both"


def test_the_trend_is_scipys_weighted_line() -> None:
    updates, passed, n = [0, 100, 200, 300, 400], [84, 100, 118, 117, 134], [250, 250, 248, 250, 250]
    found = trend(updates, passed, n)
    assert found is not None
    smooth = (np.array(passed) + 2) / (np.array(n) + 4)
    sigma = np.sqrt(smooth * (1 - smooth) / np.array(n))
    rates = np.array(passed) / np.array(n)
    line, covariance = optimize.curve_fit(
        lambda x, a, b: a + b * x, np.array(updates, float), rates, sigma=sigma, absolute_sigma=True
    )
    half = 1.959964 * math.sqrt(covariance[1, 1])
    assert (found.slope, found.lo, found.hi) == pytest.approx((line[1], line[1] - half, line[1] + half), rel=1e-4)
    at_200 = 1.959964 * math.sqrt(np.array([1, 200]) @ covariance @ np.array([1, 200]))
    middle = line[0] + 200 * line[1]
    assert found.band[2] == pytest.approx((middle - at_200, middle, middle + at_200), rel=1e-4)


def test_the_trends_interval_holds_the_true_slope_about_as_often_as_it_says() -> None:
    rng, covered = np.random.default_rng(2), 0
    updates = list(range(0, 700, 100))
    for _ in range(300):
        passed = [int(rng.binomial(200, 0.35 + 0.0003 * update)) for update in updates]
        found = trend(updates, passed, [200] * len(updates))
        assert found is not None
        covered += found.lo <= 0.0003 <= found.hi
    assert 0.91 <= covered / 300 <= 0.985


def test_a_trend_needs_three_points() -> None:
    assert trend([0, 5], [3, 4], [10, 10]) is None
    assert trend([5, 5, 5], [3, 4, 5], [10, 10, 10]) is None
    flat = trend([0, 5, 10], [0, 0, 0], [10, 10, 10])
    assert flat is not None and flat.slope == 0.0 and flat.lo < 0.0 < flat.hi, "nothing solved is still uncertain"
    assert flat.sentence().endswith("over 3 evaluations")

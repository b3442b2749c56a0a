"""Intervals and tests for pass rates: Wilson for one, a bootstrap over tasks for a difference, McNemar for pairs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from scipy import stats

RESAMPLES = 10_000
LEVEL = 0.95

Cell = tuple[str, Hashable]


@dataclass(frozen=True)
class Difference:
    """``after − before`` over ``pairs`` cells measured in both, with its 95% interval. Fractions, not points."""

    diff: float
    lo: float
    hi: float
    pairs: int

    def sentence(self) -> str:
        """``+32.0 points, 95% interval 24.1 to 39.9, n = 200 pairs``."""
        points = (100 * value for value in (self.diff, self.lo, self.hi))
        diff, lo, hi = points
        return f"{diff:+.1f} points, 95% interval {lo:.1f} to {hi:.1f}, n = {self.pairs} pairs"


def wilson(k: int, n: int) -> tuple[float, float]:
    """The 95% score interval (Wilson 1927) of ``k`` successes in ``n`` trials. Raises ValueError unless 0 ≤ k ≤ n."""
    interval = stats.binomtest(k, n).proportion_ci(LEVEL, method="wilson")
    return float(interval.low), float(interval.high)


def paired_bootstrap(
    before: Mapping[Cell, Sequence[float]],
    after: Mapping[Cell, Sequence[float]],
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Difference | None:
    """The mean of ``after − before`` over (task, harness) cells, and its percentile interval over resampled tasks.

    A cell's value is the mean of its rollouts. Tasks are resampled, not cells or rollouts: the cells of one task share
    its difficulty. Cells that are missing or empty on one side are left out; None when no cell is left.
    """
    cells = sorted((cell for cell in before if before[cell] and after.get(cell)), key=repr)
    if not cells:
        return None
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for cell in cells:
        task = cell[0]
        sums[task] = sums.get(task, 0.0) + fmean(after[cell]) - fmean(before[cell])
        counts[task] = counts.get(task, 0) + 1
    diff = sum(sums.values()) / len(cells)
    lo, hi = _percentiles(np.array(list(sums.values())), np.array(list(counts.values())), seed, resamples)
    return Difference(diff, lo, hi, len(cells))


def mcnemar(before: Sequence[bool], after: Sequence[bool]) -> float:
    """The p value of the exact two-sided McNemar test (1947) on pairs: were as many won as lost?

    Raises ValueError on unequal lengths.
    """
    won = sum(new and not old for old, new in zip(before, after, strict=True))
    lost = sum(old and not new for old, new in zip(before, after, strict=True))
    return float(stats.binomtest(won, won + lost).pvalue) if won + lost else 1.0


def _percentiles(sums: np.ndarray, counts: np.ndarray, seed: int, resamples: int) -> tuple[float, float]:
    """The interval of sum(sums) / sum(counts) when their common index is resampled."""
    if len(sums) == 1:
        value = float(sums[0] / counts[0])
        return value, value
    result = stats.bootstrap(
        (sums, counts),
        lambda own, size, axis=-1: own.sum(axis=axis) / size.sum(axis=axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=resamples,
        batch=1000,
        confidence_level=LEVEL,
        rng=np.random.default_rng(seed),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)

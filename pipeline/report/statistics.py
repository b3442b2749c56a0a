"""Intervals and tests for pass rates: Wilson for one, a bootstrap over tasks for a difference, McNemar for pairs, a
line through several checkpoints; and the tool calls that training saved.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95

Cell = tuple[str, Hashable]


def _stats() -> Any:
    from scipy import stats  # a second to import, and a report of a run without evaluations needs none of it

    return stats


@dataclass(frozen=True)
class Difference:
    """``after − before`` over ``pairs`` cells measured in both, with its 95% interval. Fractions, not points."""

    diff: float
    lo: float
    hi: float
    pairs: int

    @property
    def known(self) -> bool:
        """Whether there is an interval: when every task changed alike (a single one does), resampling says nothing."""
        return self.lo < self.hi

    def sentence(self) -> str:
        """``+32.0 points, 95% interval 24.1 to 39.9, n = 200 pairs``."""
        diff, lo, hi = (100 * value for value in (self.diff, self.lo, self.hi))
        n = f"n = {self.pairs:,} {'pair' if self.pairs == 1 else 'pairs'}"
        if not self.known:
            return f"{diff:+.1f} points, {n} (every task changed alike, so there is no interval)"
        return f"{diff:+.1f} points, 95% interval {lo:.1f} to {hi:.1f}, {n}"


def wilson(k: int, n: int) -> tuple[float, float]:
    """The 95% score interval (Wilson 1927) of ``k`` successes in ``n`` trials. Raises ValueError unless 0 ≤ k ≤ n."""
    interval = _stats().binomtest(k, n).proportion_ci(LEVEL, method="wilson")
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


@dataclass(frozen=True)
class Flips:
    """Of ``pairs``, how many are solved only after (``won``) and only before (``lost``), and McNemar's p value."""

    won: int
    lost: int
    pairs: int
    p: float

    def sentence(self) -> str:
        """``38 newly solved, 6 no longer (of 200, McNemar p < 0.001)``."""
        p = "p < 0.001" if self.p < 0.001 else f"p = {self.p:.3f}"
        return f"{self.won:,} newly solved, {self.lost:,} no longer (of {self.pairs:,}, McNemar {p})"


def flips(before: Sequence[bool], after: Sequence[bool]) -> Flips:
    """The exact two-sided McNemar test (1947) on pairs: were as many won as lost?

    It asks whether any task's chance changed at all, the bootstrap whether the mean did: so the two can disagree.
    Raises ValueError on unequal lengths.
    """
    won = sum(new and not old for old, new in zip(before, after, strict=True))
    lost = sum(old and not new for old, new in zip(before, after, strict=True))
    p = float(_stats().binomtest(won, won + lost).pvalue) if won + lost else 1.0
    return Flips(won, lost, len(before), p)


@dataclass(frozen=True)
class Savings:
    """Tool calls of ``n`` rollouts that both sides solved. ``percent`` is None where there is nothing to save from."""

    percent: float | None
    before: int
    after: int
    n: int

    def sentence(self) -> str:
        """``31.1% fewer tool calls (8,120 → 5,595) where both solved the task, n = 405``."""
        if self.percent is None:
            return f"tool calls saved: not known, n = {self.n} rollouts solved by both"
        word = "fewer" if self.percent >= 0 else "more"
        calls = f"{self.before:,} → {self.after:,}"
        return f"{abs(self.percent):.1f}% {word} tool calls ({calls}) where both solved the task, n = {self.n:,}"


def savings(pairs: Iterable[tuple[int, int]]) -> Savings:
    """``100·(1 − Σ after / Σ before)`` over (tool calls before, after) of the rollouts that both sides solved."""
    known = list(pairs)
    before, after = sum(pair[0] for pair in known), sum(pair[1] for pair in known)
    return Savings(100 * (1 - after / before) if before else None, before, after, len(known))


@dataclass(frozen=True)
class Trend:
    """A straight line through the pass rates of checkpoints: its slope an update, and its value with the 95% band at
    each of the updates.
    """

    slope: float
    lo: float
    hi: float
    band: tuple[tuple[float, float, float], ...]  # (low, line, high) at each update

    def sentence(self) -> str:
        """``+1.2 points per 100 updates, 95% interval 0.3 to 2.1, over 5 evaluations``."""
        slope, lo, hi = (1e4 * value for value in (self.slope, self.lo, self.hi))
        return (
            f"{slope:+.1f} points per 100 updates, 95% interval {lo:.1f} to {hi:.1f}, over {len(self.band)} evaluations"
        )


def trend(updates: Sequence[float], passed: Sequence[int], n: Sequence[int]) -> Trend | None:
    """The weighted line through ``passed[i]`` of ``n[i]`` at ``updates[i]``; None below three points or two updates.

    The noise is the binomial one of each point (with two successes and two failures added, Agresti and Coull 1998, so
    that 0 of n has some); it is not estimated from how the points scatter. All evaluations have the same tasks, so the
    band is a little wide for the slope.
    """
    x, k, size = (np.asarray(values, dtype=float) for values in (updates, passed, n))
    if len(x) < 3 or len(set(updates)) < 2:
        return None
    smooth = (k + 2) / (size + 4)
    design = np.stack([np.ones_like(x), x], axis=1)
    weights = size / (smooth * (1 - smooth))
    covariance = np.linalg.inv(design.T @ (weights[:, None] * design))
    line = covariance @ design.T @ (weights * k / size)
    z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
    middle = design @ line
    half = z * np.sqrt(np.einsum("ij,jk,ik->i", design, covariance, design))
    slope, spread = float(line[1]), z * float(np.sqrt(covariance[1, 1]))
    band = tuple((float(m - h), float(m), float(m + h)) for m, h in zip(middle, half, strict=True))
    return Trend(slope, slope - spread, slope + spread, band)


def _percentiles(sums: np.ndarray, counts: np.ndarray, seed: int, resamples: int) -> tuple[float, float]:
    """The interval of sum(sums) / sum(counts) when their common index is resampled."""
    if len(sums) == 1:
        value = float(sums[0] / counts[0])
        return value, value
    result = _stats().bootstrap(
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

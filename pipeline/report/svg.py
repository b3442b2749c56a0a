"""Line charts as inline SVG, and what the page's script needs to show the values under the pointer.

Colours are classes (c0, c1, …) that the style sheet gives for light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

BANDWIDTH = 0.06  # width of the smoothing kernel as a share of the run
WIDTH, HEIGHT = 420.0, 230.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 16.0, 10.0, 26.0
COLORS = 10
SMOOTHED = 8  # from so many points on, a smooth line is drawn over them
TICKS = 4
ASIDE = 3.0  # by so much the bars of the next line stand beside those of the last, which they would hide

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line. ``intervals``: (low, high) of each point; ``band``: (low, line, high) of each, for a trend."""

    name: str
    color: int
    points: Sequence[Point]
    intervals: Sequence[tuple[float, float]] = ()
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True)
class Chart:
    """A chart over updates. ``percent``: values are fractions."""

    title: str
    series: Sequence[Series]
    percent: bool = False
    top: float = 0.0  # the axis reaches at least so far
    note: str = ""

    @property
    def kept(self) -> list[Series]:
        """The lines that have a point."""
        return [series for series in self.series if series.points]

    def data(self) -> dict[str, Any]:
        """For the script: where each update lies and what each line is there."""
        scale = _Scale(self)
        updates = sorted({x for series in self.kept for x, _ in series.points})
        values = [dict(series.points) for series in self.kept]
        return {
            "x": updates,
            "at": [round(scale.x(x), 1) for x in updates],
            "names": [series.name for series in self.kept],
            "values": [[_rounded(own.get(x)) for x in updates] for own in values],
            "percent": self.percent,
        }

    def svg(self) -> str:
        """The picture; the legend is the page's."""
        scale = _Scale(self)
        drawn = [_axes(scale, self.percent), *(_line(series, scale) for series in self.kept)]
        cursor = f'<line class="cursor" x1="0" x2="0" y1="{TOP:g}" y2="{HEIGHT - BOTTOM:g}" visibility="hidden"/>'
        label = escape(f"{self.title}, by update. The arrow keys show the values of an update.", quote=True)
        opening = f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" tabindex="0" aria-label="{label}">'
        return f"{opening}{''.join(drawn)}{cursor}</svg>"


def smooth(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Gaussian kernel mean of ``y`` over ``x``; at the ends only what lies inside counts."""
    width = max(1.0, BANDWIDTH * float(x[-1] - x[0]))
    weights = np.exp(-0.5 * ((x[:, None] - x[None, :]) / width) ** 2)
    return weights @ y / weights.sum(axis=1)


class _Scale:
    """From values to places in the picture."""

    def __init__(self, chart: Chart) -> None:
        x = [x for series in chart.kept for x, _ in series.points]
        y = [y for series in chart.kept for _, y in series.points]
        y += [end for series in chart.kept for ends in (*series.intervals, *series.band) for end in ends]
        self.x0, self.x1 = min(x, default=0.0), max(x, default=1.0)
        low, high = min(0.0, *y, 0.0), max([chart.top, *y])
        self.step = _step(high - low)
        self.y0 = self.step * math.floor(low / self.step + 1e-9)
        self.y1 = max(self.step, self.step * math.ceil(high / self.step - 1e-9))

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((value - self.x0) / (self.x1 - self.x0) if self.x1 > self.x0 else 0.5)

    def y(self, value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.y1 - value) / (self.y1 - self.y0)


def _step(span: float) -> float:
    """The distance of the grid lines: 1, 2 or 5 times a power of ten."""
    rough = (span or 1.0) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * 0.999)


def _axes(scale: _Scale, percent: bool) -> str:
    parts = []
    for number in range(round((scale.y1 - scale.y0) / scale.step) + 1):
        value = scale.y0 + number * scale.step
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6:g}" y="{y + 3.5:.1f}" text-anchor="end">{number_text(value, percent)}</text>')
    for value in _whole_ticks(scale.x0, scale.x1):
        x = scale.x(value)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 8:g}" text-anchor="middle">{value:g}</text>')
    return "".join(parts)


def _whole_ticks(low: float, high: float) -> list[float]:
    """A few whole updates between the ends."""
    step = max(1.0, _step(high - low))
    first = math.ceil(low / step)
    return [step * number for number in range(first, math.floor(high / step) + 1)]


def _line(series: Series, scale: _Scale) -> str:
    aside = ASIDE * (series.color % COLORS) if series.intervals else 0.0
    places = [(scale.x(x) + aside, scale.y(y)) for x, y in series.points]
    shown = _band(series, scale) + _bars(series, places, scale)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2"/>' for x, y in places)
    if series.band:
        return f'<g class="c{series.color % COLORS}">{shown}{dots}</g>'
    thick = places
    if len(places) >= SMOOTHED:
        x, y = (np.array(axis) for axis in zip(*series.points, strict=True))
        thick = [(scale.x(a), scale.y(b)) for a, b in zip(x, smooth(x, y), strict=True)]
        dots = f'<polyline class="raw" points="{_points(places)}"/>'
    return f'<g class="c{series.color % COLORS}">{shown}{dots}<polyline class="line" points="{_points(thick)}"/></g>'


def _band(series: Series, scale: _Scale) -> str:
    if not series.band:
        return ""
    x = [scale.x(point[0]) for point in series.points]
    low, middle, high = ([scale.y(ends[place]) for ends in series.band] for place in range(3))
    outline = [*zip(x, high, strict=True), *reversed([*zip(x, low, strict=True)])]
    line = _points([*zip(x, middle, strict=True)])
    return f'<polygon class="band" points="{_points(outline)}"/><polyline class="line" points="{line}"/>'


def _bars(series: Series, places: Sequence[Point], scale: _Scale) -> str:
    ends = zip(places, series.intervals, strict=bool(series.intervals)) if series.intervals else ()
    return "".join(
        f'<line class="bar" x1="{x:.1f}" x2="{x:.1f}" y1="{scale.y(low):.1f}" y2="{scale.y(high):.1f}"/>'
        for (x, _), (low, high) in ends
    )


def _points(places: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def number_text(value: float, percent: bool = False) -> str:
    """A figure for an axis or a cell: 42%, 0.31, 1,234."""
    if percent:
        return f"{100 * value:.3g}%"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")

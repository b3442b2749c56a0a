"""Learning curves as PNG: of a run, with tool calls and malformed calls below; of a sweep's runs, side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pipeline.report.store import publish
from pipeline.report.svg import smooth

BLUE, ORANGE, GREEN, RED, INK, GREY = "#2f6db3", "#e08a1e", "#3a8f5c", "#c0413b", "#222222", "#8a8a8a"
DPI = 160
COLUMNS = 4  # of small curves side by side

Entry = Mapping[str, Any]


def learning_curve(
    metrics: Sequence[Entry], path: Path, results: Mapping[str, Any] | None = None, title: str = ""
) -> None:
    """Publish the picture. ``metrics``: one entry an update; ``results``: of results.json, for the held-out points."""
    figure = Figure(figsize=(8.0, 6.2), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2.0, 1.0))
    _draw_learning(top, metrics, results)
    top.set_ylabel("pass rate, reward")
    _finish(top, top.get_legend_handles_labels()[0])
    _draw_conduct(bottom, metrics)
    bottom.set_xlabel("update")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(title or "Learning curve", x=0.015, ha="left", fontweight="bold", color=INK)
    publish(path, lambda temporary: figure.savefig(temporary, dpi=DPI, format="png"))


def side_by_side(curves: Sequence[tuple[str, Sequence[Entry], Mapping[str, Any] | None]], path: Path) -> None:
    """Publish one small learning curve a run, all with the same axes. ``curves``: (title, metrics, results) of each."""
    columns = min(COLUMNS, max(1, len(curves)))
    rows = max(1, math.ceil(len(curves) / columns))
    figure = Figure(figsize=(1.0 + 3.2 * columns, 0.8 + 2.6 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, (title, metrics, results) in zip(grid.flat, curves, strict=False):
        _draw_learning(axes, metrics, results)
        _clean(axes)
        axes.margins(x=0.12)  # room for the figures at both ends
        axes.set_title(title, fontsize=8.5, color=INK)
    for axes in grid.flat[len(curves) :]:
        axes.set_visible(False)
    grid[0, 0].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.supxlabel("update", fontsize=9)
    figure.supylabel("pass rate, reward", fontsize=9)
    named = {
        label: handle for axes in grid.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if named:
        figure.legend(named.values(), named.keys(), loc="outside upper center", ncols=3, frameon=False, fontsize=8.5)
    publish(path, lambda temporary: figure.savefig(temporary, dpi=DPI, format="png"))


def _draw_learning(axes: Axes, metrics: Sequence[Entry], results: Mapping[str, Any] | None) -> None:
    _curve(axes, metrics, "pass_rate", BLUE, "training pass rate")
    _curve(axes, metrics, "reward", ORANGE, "training reward")
    if results is not None:
        _held_out(axes, results)
    axes.set_ylim(bottom=0.0)


def _draw_conduct(axes: Axes, metrics: Sequence[Entry]) -> None:
    _curve(axes, metrics, "tool_calls", GREEN, "tool calls a rollout")
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("tool calls", color=GREEN)
    right = axes.twinx()
    _curve(right, metrics, "malformed_rate", RED, "malformed calls")
    right.set_ylim(0.0, max(0.1, 1.25 * max(_column(metrics, "malformed_rate")[1], default=0.0)))
    right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    right.set_ylabel("malformed calls", color=RED)
    right.spines[["top", "left"]].set_visible(False)
    handles = [*axes.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    _finish(axes, handles)


def _column(metrics: Sequence[Entry], name: str) -> tuple[np.ndarray, np.ndarray]:
    points = [(entry["update"], entry[name]) for entry in metrics if name in entry]
    x, y = zip(*points, strict=True) if points else ((), ())
    return np.array(x, dtype=float), np.array(y, dtype=float)


def _curve(axes: Axes, metrics: Sequence[Entry], name: str, color: str, label: str) -> None:
    x, y = _column(metrics, name)
    if not len(x):
        return
    axes.plot(x, y, color=color, alpha=0.35, linewidth=0.9, marker="o", markersize=2.5)
    axes.plot(x, smooth(x, y), color=color, linewidth=2.2, label=label)


def _held_out(axes: Axes, results: Mapping[str, Any]) -> None:
    """Before and after with their values; checkpoints between them, smaller."""
    label = "held-out pass@1, 95% interval"
    for entry in results["checkpoints"]:
        if entry["update"] is not None and entry["interval"] is not None:
            _point(axes, entry["update"], entry, 4, label)
            label = "_"
    for key, x in (("before", 0), ("after", results["updates"])):
        side = results[key]
        if side is None:
            continue
        _point(axes, x, side, 6, label)
        text, place = f"{side['pass@1']:.2f}", (x, side["interval"][1])
        axes.annotate(text, place, (0, 5), textcoords="offset points", ha="center", weight="bold", color=INK)
        label = "_"


def _point(axes: Axes, x: float, side: Mapping[str, Any], size: float, label: str) -> None:
    rate, (lo, hi) = side["pass@1"], side["interval"]
    error = [[rate - lo], [hi - rate]]
    axes.errorbar(x, rate, error, color=INK, fmt="D", markersize=size, capsize=4, zorder=5, label=label)


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GREY, alpha=0.2, linewidth=0.6)


def _finish(axes: Axes, handles: list[Any]) -> None:
    _clean(axes)
    if handles:
        axes.legend(handles=handles, frameon=False, fontsize=8.5, loc="best")

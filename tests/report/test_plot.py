"""The picture is a picture, whatever is missing; the smoothing is a mean."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from pipeline.report.plot import DPI, learning_curve, side_by_side, smooth

METRICS = [
    {"update": n, "pass_rate": 0.3 + 0.01 * n, "reward": 0.3 + 0.011 * n, "tool_calls": 2.0, "malformed_rate": 0.1}
    for n in range(1, 25)
]
SIDE = {"pass@1": 0.36, "interval": [0.29, 0.44]}
RESULTS = {"before": SIDE, "after": {"pass@1": 0.63, "interval": [0.57, 0.69]}, "updates": 24, "checkpoints": []}


def ink(path: Path) -> int:
    return int((image.imread(path)[..., :3].min(axis=2) < 0.9).sum())


def test_smoothing_keeps_constants_and_lines_and_calms_noise() -> None:
    x = np.arange(1.0, 51.0)
    np.testing.assert_allclose(smooth(x, np.full(50, 0.4)), 0.4)
    np.testing.assert_allclose(smooth(x, x)[12:-12], x[12:-12], atol=1e-3)
    noise = np.random.default_rng(0).standard_normal(50)
    assert smooth(x, noise).std() < 0.6 * noise.std()
    np.testing.assert_allclose(smooth(np.array([3.0]), np.array([0.7])), [0.7])


@pytest.mark.slow
def test_curves_and_held_out_points_leave_ink(tmp_path: Path) -> None:
    learning_curve(METRICS, tmp_path / "a" / "full.png", RESULTS, "a run")
    learning_curve(METRICS, tmp_path / "curve.png")
    learning_curve([], tmp_path / "empty.png")
    points = [{"update": 8, **SIDE}, {"update": 16, "pass@1": None, "interval": None}, {"update": None, **SIDE}]
    learning_curve(METRICS, tmp_path / "points.png", RESULTS | {"checkpoints": points}, "a run")
    assert ink(tmp_path / "a" / "full.png") > ink(tmp_path / "curve.png") > ink(tmp_path / "empty.png") > 0
    assert ink(tmp_path / "points.png") > ink(tmp_path / "a" / "full.png"), "a checkpoint's evaluation is a point"
    assert min(image.imread(tmp_path / "curve.png").shape[:2]) >= 800


@pytest.mark.parametrize("metrics", [[], METRICS[:1], [{"update": 0, "eval/pass@1": 0.3}]])
def test_a_short_run_is_drawn_without_a_warning(tmp_path: Path, metrics: list[dict[str, float]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learning_curve(metrics, tmp_path / "curve.png", RESULTS | {"after": None, "updates": 0})
    assert (tmp_path / "curve.png").stat().st_size > 1000


@pytest.mark.parametrize(("runs", "columns", "rows"), [(0, 1, 1), (1, 1, 1), (3, 3, 1), (6, 4, 2)])
def test_runs_side_by_side_are_drawn_without_a_warning(tmp_path: Path, runs: int, columns: int, rows: int) -> None:
    curves = [("not started", [], None), ("short", METRICS[:1], None), ("whole", METRICS, RESULTS)] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        side_by_side(curves[:runs], tmp_path / "curves.png")
    height, width = image.imread(tmp_path / "curves.png").shape[:2]
    assert (height // (2.6 * DPI), width // (3.2 * DPI)) == (rows, columns), "up to four beside each other"

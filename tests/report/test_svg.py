"""Charts: points lie where their values are, whatever the values; the script's numbers are those that were drawn."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.report.curves import learning_charts, staleness_charts, throughput_charts, trend_charts
from pipeline.report.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, Series, number_text

VALUES = st.floats(-1e6, 1e6, allow_nan=False).map(lambda value: round(value, 3))


@given(st.lists(VALUES, min_size=1, max_size=30), st.booleans())
def test_every_chart_is_xml_inside_its_frame(values: list[float], percent: bool) -> None:
    chart = Chart('a < b & "c"', [Series("x", 0, list(enumerate(values)))], percent)
    root = ElementTree.fromstring(chart.svg())
    assert (root.get("aria-label") or "").startswith('a < b & "c", by update')
    for line in root.iter("polyline"):
        for x, y in (map(float, pair.split(",")) for pair in (line.get("points") or "").split()):
            assert LEFT - 0.1 <= x <= WIDTH - RIGHT + 0.1 and TOP - 0.1 <= y <= HEIGHT - BOTTOM + 0.1
    data = chart.data()
    assert len(data["x"]) == len(data["at"]) == len(data["values"][0]) == len(values)
    assert data["values"][0] == pytest.approx(values, rel=1e-3, abs=1e-9)


def test_points_lie_at_their_values() -> None:
    svg = Chart("t", [Series("x", 0, [(0, 0.0), (10, 1.0)])]).svg()
    (points,) = re.findall(r'class="line" points="(.*?)"', svg)
    assert points == f"{LEFT:.1f},{HEIGHT - BOTTOM:.1f} {WIDTH - RIGHT:.1f},{TOP:.1f}"
    assert re.findall(r'text-anchor="end">(.*?)<', svg) == ["0", "0.5", "1"]


def test_a_line_that_lacks_an_update_has_no_value_there() -> None:
    data = Chart("t", [Series("a", 0, [(1, 1.0), (2, 2.0)]), Series("b", 1, [(2, 5.0)]), Series("c", 2, [])]).data()
    assert (data["x"], data["names"], data["values"]) == ([1, 2], ["a", "b"], [[1.0, 2.0], [None, 5.0]])


def test_numbers() -> None:
    assert [number_text(value) for value in (0.25, 12, 1234.5)] == ["0.25", "12", "1,234"]
    assert [number_text(value, percent=True) for value in (0.25, 0.005)] == ["25%", "0.5%"]


def test_charts_of_metrics_take_each_harness_and_leave_gaps() -> None:
    metrics = [
        {"update": 1, "reward": 0.3, "pi/reward": 0.5, "codex/reward": 0.1, "sample/staleness_max": 2.0},
        {"update": 2, "reward": 0.4, "pi/reward": 0.6, "perf/step_s": 9.0},
    ]
    reward, *others = learning_charts(metrics)
    found = {series.name: list(series.points) for series in reward.kept}
    assert found == {"codex": [(1, 0.1)], "pi": [(1, 0.5), (2, 0.6)]}
    assert not any(chart.kept for chart in others)
    assert [series.name for series in staleness_charts(metrics)[0].kept] == ["largest"]
    assert [series.name for chart in throughput_charts(metrics) for series in chart.kept] == ["a whole update"]


def part(rate: float, n: int) -> dict[str, Any]:
    return {"pass@1": rate, "n": n, "interval": [rate - 0.1, rate + 0.1]}


def whole(rate: float) -> dict[str, Any]:
    return part(rate, 40) | {"harnesses": {"pi": part(rate, 20), "codex": part(rate, 20)}}


def test_the_trend_takes_every_evaluation_in_the_order_of_updates() -> None:
    checkpoint = {"update": 5, "pass@1": 0.3, "interval": [0.2, 0.4], "graded": 20}
    checkpoint["harnesses"] = {"pi": {"pass@1": 0.3, "interval": [0.2, 0.4], "graded": 20}}
    unknown = {"update": None, "pass@1": 0.9, "harnesses": {}}
    results = {"before": whole(0.2), "after": whole(0.5), "updates": 9, "checkpoints": [checkpoint, unknown]}
    (chart,), sentences = trend_charts(results)
    lines = {series.name: series for series in chart.kept}
    assert list(lines["pi"].points) == [(0, 0.2), (5, 0.3), (9, 0.5)] and len(lines["pi"].band) == 3
    assert list(lines["codex"].points) == [(0, 0.2), (9, 0.5)] and not lines["codex"].band
    assert [name for name, _ in sentences] == ["pi", "all"]
    assert trend_charts({**results, "checkpoints": []}) == ([], []), "two points are no trend"


def test_the_trend_leaves_out_what_lacks_grades_or_is_of_other_tasks() -> None:
    def evaluated(update: int, cohort: str, provisional: bool = False) -> dict[str, Any]:
        return {**whole(0.1 * update), "update": update, "cohort": cohort, "provisional": provisional}

    small = [evaluated(update, "few") for update in (2, 3, 4)]
    sides = {"before": {**whole(0.9), "cohort": "all"}, "after": {**whole(0.9), "cohort": "all"}, "updates": 9}
    (chart,), _ = trend_charts({**sides, "checkpoints": [*small, evaluated(5, "few", provisional=True)]})
    assert [x for x, _ in chart.kept[0].points] == [2, 3, 4]
    (chart,), _ = trend_charts({**sides, "checkpoints": [*small[:2], evaluated(6, "all")]})
    assert [x for x, _ in chart.kept[0].points] == [0, 6, 9]

"""The page of a sweep: runs by their settings, against the first; harmless, and right in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from browser import Page
from outline import outline
from page_runs import EVIL, metrics, page_run

from pipeline.report.svg import COLORS
from pipeline.report.sweep_page import sweep_charts, sweep_page, write_sweep_page


def against(difference: Any, *differs: str, provisional: bool = False) -> dict[str, Any]:
    return {"difference": difference, "comparable": None, "differs": list(differs), "provisional": provisional}


def point(name: str, number: int, **fields: Any) -> dict[str, Any]:
    """A finished run; all but the first have a difference against it."""
    results = page_run(name).results
    taken = {key: results[key] for key in ("before", "after", "difference", "provisional")}
    return {
        "name": name,
        "overrides": [f"algorithm.lr={number}e-6", "+mix=four"],
        "state": "done",
        "reason": "",
        "updates": 12,
        "updates_planned": 12,
        "reward": 0.5,
        "wall_s": 3720.0,
        "against": against(results["difference"]) if number else None,
        "page": f"../{name}/report/index.html",
        **taken,
        **fields,
    }


def sweep(*points: dict[str, Any]) -> dict[str, Any]:
    return {"name": "mine", "points": list(points)}


def three() -> dict[str, Any]:
    """One that has not begun, and one whose words are evil."""
    nothing = dict.fromkeys(("before", "after", "difference", "page", "reward", "wall_s"))
    waits = point(
        "c",
        2,
        **nothing,
        against=against(None),
        state="queued",
        updates=0,
        updates_planned=0,
        overrides=["algorithm.lr=3e-6"],
    )
    return sweep(point("a", 0), point("b", 1, state="failed", reason=EVIL), waits)


def test_runs_stand_by_their_settings() -> None:
    text = sweep_page(three(), [metrics(12), metrics(4), []])
    heads = re.findall(r'<th scope="col">(.*?)</th>', text)
    assert heads[:3] == ["run", "algorithm.lr", "mix"] and heads[-5:] == ["run", "harness", *heads[-3:]]
    first, second, third = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', text)[:3]
    assert first[0] == '<a href="../a/report/index.html">a</a>' and third[0] == "c"
    assert "<td>0e-6</td><td>four</td><td>done</td><td>12/12</td>" in first[1]
    assert first[1].endswith("<td>–</td><td>1 h 02 min</td>"), "the first is not compared with itself"
    assert "<td>+30.0<br><small>(+12.5 to +47.5)</small></td><td>1 h 02 min</td>" in second[1]
    assert third[1].startswith("<td>3e-6</td><td>–</td><td>queued</td>")


def test_every_run_is_compared_in_sentences() -> None:
    text = sweep_page(three(), [metrics(12), metrics(4), []])
    assert "After training, against a, on the tasks" in text
    assert "<li>b: +30.0 points, 95% interval 12.5 to 47.5, n = 40 pairs; 12 newly solved, 0 no longer" in text
    assert "<li>b, pi: +40.0 points" in text and "<li>a: +30.0 points" in text
    assert "No held-out task was evaluated after training" in sweep_page(sweep(point("a", 0)), [[]])


def test_what_cannot_be_compared_is_said() -> None:
    others = [
        point("b", 1, against=against(None, "tasks differ: 3 of 40, the first is t7")),
        point("c", 2, against=against(None, provisional=True)),
        point("d", 3, against=against(page_run().results["difference"], "pi ran at version 1, then 2")),
    ]
    text = sweep_page(sweep(point("a", 0), *others), [[]] * 4)
    assert "<li>b: they cannot be compared: tasks differ: 3 of 40, the first is t7.</li>" in text
    assert "<li>c: not told before every rollout of both is graded.</li>" in text
    assert "<li>d: not like with like: pi ran at version 1, then 2.</li>" in text and "<li>d: +30.0 points" in text


def test_text_of_a_sweep_cannot_become_part_of_its_page() -> None:
    found = outline(sweep_page(three(), [metrics(12), metrics(4), []]))
    tags = [tag for tag, _ in found.seen]
    assert tags.count("script") == 2 and "img" not in tags
    assert len(json.loads(found.scripts[0])["charts"]) == tags.count("figure") == 1


def test_runs_share_charts_while_the_colours_suffice() -> None:
    names = [f"run {number}" for number in range(COLORS + 1)]
    few = sweep_charts(names[:COLORS], [metrics(3)] * COLORS)
    assert [line.name for line in few[0].kept] == names[:COLORS] and len(few) == 4
    many = sweep_charts(names, [[{"update": 1, "reward": float(number)}] for number in range(COLORS + 1)])
    assert [chart.title for chart in many] == names and {chart.top for chart in many} == {float(COLORS)}


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1280, True), (360, False)])
def test_the_page_in_a_browser(chromium: Page, tmp_path: Path, width: int, dark: bool) -> None:
    write_sweep_page(tmp_path / "index.html", three(), [metrics(12), metrics(4), []])
    chromium.requests.clear()
    chromium.errors.clear()
    chromium.open((tmp_path / "index.html").as_uri(), width, dark)
    assert chromium.value("document.title") == "Yoke: sweep mine"
    chromium.point_at("figure.chart svg")
    assert chromium.value("document.querySelector('figure.chart output').textContent").startswith("update ")
    assert chromium.value("document.documentElement.scrollWidth") <= width
    assert chromium.errors == []
    asked = [url for url in chromium.requests if not url.startswith("data:")]
    assert asked == [(tmp_path / "index.html").as_uri()]

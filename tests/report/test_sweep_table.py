"""The table of a sweep: what is not there is a dash, and harnesses are told apart only where there are several."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from pipeline.report.sweep_table import markdown, print_sweep


def side(rate: float, *harnesses: str) -> dict[str, Any]:
    own = {"pass@1": rate, "n": 10, "interval": [rate - 0.1, rate + 0.1]}
    return own | {"harnesses": {name: own for name in harnesses}}


def point(name: str, **fields: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("reason", "reward", "before", "after", "difference", "provisional", "wall_s"))
    return {"name": name, "state": "queued", "updates": 0, "updates_planned": 12, **empty, **fields}


def sweep(*points: dict[str, Any]) -> dict[str, Any]:
    return {"name": "mine", "points": list(points)}


@pytest.mark.parametrize(
    ("seconds", "shown"), [(None, "–"), (90.0, "1.5 min"), (3600.0, "1 h 00 min"), (7500.0, "2 h 05 min")]
)
def test_wall_time(seconds: float | None, shown: str) -> None:
    assert f"| {shown} |" in markdown(sweep(point("a", wall_s=seconds)))


def test_one_harness_has_no_table_of_its_own() -> None:
    alone = point("a", before=side(0.25, "pi"))
    assert "| harness |" not in markdown(sweep(alone))
    both = markdown(sweep(alone, point("b", after=side(0.5, "pi", "codex"))))
    assert "| b | codex | – | 50.0% of 10 (40 to 60) | – |" in both and "| a | pi |" not in both


def test_a_narrow_terminal_shows_whole_names_and_states() -> None:
    told = io.StringIO()
    name = "aggregation-token_mean+mix-four"
    results = sweep(point(name, state="not started", before=side(0.25, "pi"), after=side(0.5, "pi"), wall_s=90.0))
    print_sweep(results, Console(file=told, width=80))
    lines = told.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and any("not started" in line for line in lines)
    first_column = "".join(line[:25].split()[0] for line in lines if line[:25].split())
    assert "+mix-four" in first_column and "…" not in told.getvalue()


def test_reasons_and_missing_rollouts_stand_below() -> None:
    text = markdown(sweep(point("a", state="failed", reason="[boom]"), point("b", provisional=True), point("c")))
    assert text.endswith("a: [boom]\n\nProvisional, some rollouts are ungraded: b.\n")

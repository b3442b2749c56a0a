"""results.json against hand computation, and the table that is made of it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.records import RolloutRecord
from pipeline.report.results import Meta, build_results, checkpoint_summary, write_results
from pipeline.report.statistics import wilson
from pipeline.report.table import checkpoint_rows, markdown_table, print_results

Make = Callable[..., RolloutRecord]


def evaluation(rollout: Make, passes: dict[str, list[bool]], **fields: Any) -> list[RolloutRecord]:
    """``passes[harness]``: the outcomes of tasks t0, t0, t1, t1, … (two rollouts a task)."""
    return [
        rollout(f"t{place // 2}", harness, passed, index=place % 2, **fields)
        for harness, outcomes in passes.items()
        for place, passed in enumerate(outcomes)
    ]


METRICS = [
    {"update": 0, "eval/pass@1": 0.25},
    {"update": 1, "sample/staleness_max": 1.0, "perf/weight_sync_s": 0.1},
    {"update": 2, "sample/staleness_max": 2.0, "perf/weight_sync_s": 0.3},
]


def meta(planned: int = 8) -> Meta:
    return {
        "seed": 7,
        "rollouts": 96,
        "wall_s": {"evaluation before": 60.0, "training": 120.0},
        "harness_versions": {"pi": "1.6.0"},
        "set_aside": {},
        "planned": planned,
    }


@pytest.fixture
def results(rollout: Make) -> dict[str, Any]:
    before = evaluation(
        rollout,
        {"pi": [False, False, True, False], "codex": [True, False, False, False]},
        tool_calls=4,
        calls=5,
        malformed=1,
    )
    after = evaluation(
        rollout, {"pi": [True, True, True, False], "codex": [True, True, False, False]}, tool_calls=2, calls=4
    )
    return build_results(before, after, METRICS, meta())


def test_every_promised_figure_is_there_and_right(results: dict[str, Any]) -> None:
    before, after = results["before"], results["after"]
    assert (before["pass@1"], before["n"], before["interval"]) == (0.25, 8, list(wilson(2, 8)))
    assert (before["tool_calls"], before["malformed_rate"], before["coverage"]) == (4.0, pytest.approx(0.2), 1.0)
    assert (after["pass@1"], after["tool_calls"], after["malformed_rate"]) == (0.625, 2.0, 0.0)
    assert {name: part["pass@1"] for name, part in after["harnesses"].items()} == {"codex": 0.5, "pi": 0.75}
    assert before["harnesses"]["pi"]["interval"] == list(wilson(1, 4))
    assert (results["updates"], results["rollouts"], results["seed"]) == (2, 96, 7)
    assert (results["sync_s"], results["sync_max_s"], results["max_staleness"]) == (pytest.approx(0.2), 0.3, 2.0)
    assert results["wall_s"] == {"evaluation before": 60.0, "training": 120.0, "total": 180.0}
    assert results["provisional"] is False


def test_the_difference_is_paired_by_task_and_harness(results: dict[str, Any]) -> None:
    change = results["difference"]
    assert change["pass@1"] == pytest.approx(0.375)
    assert change["pairs"] == 4
    # By task: t0 rises 1.0 in pi and 0.5 in codex, t1 by 0 in both: resampled means are 0, 0.375 or 0.75.
    assert change["interval"] == pytest.approx([0.0, 0.75])
    # Lost: none. Won: pi t0 twice, codex t0 once.
    assert change["mcnemar_p"] == pytest.approx(2 * 0.5**3) == change["flips"]["p"]
    assert change["flips"]["sentence"].startswith("3 newly solved, 0 no longer (of 8, McNemar p = 0.250)")
    assert change["harnesses"]["pi"]["pass@1"] == pytest.approx(0.5)
    assert change["sentence"] == "+37.5 points, 95% interval 0.0 to 75.0, n = 4 pairs"


def test_versions_and_commit_are_those_of_this_installation(results: dict[str, Any]) -> None:
    assert results["versions"]["torch"] == metadata.version("torch")
    assert results["versions"]["deepspeed"] == metadata.version("deepspeed")
    assert results["versions"]["vllm"]
    assert results["versions"]["harness"] == {"pi": "1.6.0"}
    commit = results["git_commit"]
    assert commit is None or len(commit.removesuffix("+dirty")) == 40


def test_missing_rollouts_make_it_provisional(rollout: Make) -> None:
    side = evaluation(rollout, {"pi": [True, False]})
    whole, ungraded = [*side, rollout("t9")], [*side, rollout("t9", passed=None)]
    assert build_results(whole, whole, METRICS, meta(planned=3))["provisional"] is False
    results = build_results(whole, ungraded, METRICS, meta(planned=3))
    assert results["provisional"] is True
    assert results["after"]["coverage"] == pytest.approx(2 / 3)
    assert (results["after"]["n"], results["after"]["ungraded"]) == (2, 1)
    assert "Provisional" in markdown_table(results)


def test_an_evaluation_that_did_not_run_is_null(rollout: Make, tmp_path: Path) -> None:
    results = build_results([], evaluation(rollout, {"pi": [True, False]}), [], meta(planned=2))
    write_results(tmp_path / "report" / "results.json", results)
    read = json.loads((tmp_path / "report" / "results.json").read_text())
    assert read["before"] is None and read["difference"] is None and read["provisional"] is False
    assert (read["updates"], read["sync_s"], read["max_staleness"]) == (0, None, None)
    text = markdown_table(read)
    assert "not measured" in text and "| pi | – | 50.0%" in text


def test_the_table_shows_each_harness_and_all(results: dict[str, Any]) -> None:
    lines = markdown_table(json.loads(json.dumps(results))).splitlines()
    assert lines[2].startswith("| codex | 25.0% of 4 (5 to 70) | 50.0% of 4 (15 to 85) | +25.0 (")
    assert lines[3].startswith("| pi |")
    rates = "| all | 25.0% of 8 (7 to 59) | 62.5% of 8 (31 to 86) |"
    assert lines[4] == f"{rates} +37.5 (+0.0 to +75.0) | 4.00 → 2.00 | 20.0% → 0.0% |"
    assert lines[6] == "Held-out pass@1: +37.5 points, 95% interval 0.0 to 75.0, n = 4 pairs."


def test_nothing_is_cut_on_80_columns(results: dict[str, Any]) -> None:
    for name in ("before", "after", "difference"):
        harnesses = results[name]["harnesses"]
        harnesses["mini-swe-agent"] = harnesses.pop("codex")
    results["after"]["harnesses"]["pi"]["n"] = 1000
    stream = io.StringIO()
    print_results(results, Console(file=stream, width=80))
    shown = stream.getvalue()
    cells = (
        "mini-swe-agent",
        "75.0% of 1000",
        "(31 to 86)",
        "+37.5",
        "(+0.0 to +75.0)",
        "→ 2.00",
        "20.0%",
        "malformed",
    )
    for cell in (*cells, "2 updates, 96 training rollouts, 3.0 minutes, seed 7."):
        assert cell in shown
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_what_speaks_against_the_figures_is_said(rollout: Make) -> None:
    side = evaluation(rollout, {"pi": [True, False], "codex": [True, True]})
    side = [replace(record, info={"tool_calls_differ": record.task_id == "t1"}) for record in side]
    codex = [record for record in side if record.harness == "codex"]
    silent = [replace(record, harness="vibe", info={}) for record in codex]
    told = meta(planned=6) | {"set_aside": {"vibe": "3 groups in a row failed, up to update 1: no answer"}}
    results = build_results([*side, *silent], [*side, *silent], METRICS, told)
    assert results["set_aside"] == told["set_aside"]
    assert results["after"]["harnesses"]["pi"]["outcomes"] == {"solved": 1, "unsolved": 1}
    text = markdown_table(json.loads(json.dumps(results)))
    assert "differ from the harness's own log: codex 0.0%, pi 0.0%." in text
    assert "vibe was set aside during training: 3 groups in a row failed, up to update 1: no answer." in text
    side[0] = replace(side[0], info={"tool_calls_differ": True})
    assert "pi 50.0%." in markdown_table(build_results(side, side, METRICS, meta(planned=4)))
    assert "own log" not in markdown_table(build_results(silent, silent, METRICS, meta(planned=2)))


def test_checkpoints_by_harness_with_what_is_missing(rollout: Make) -> None:
    found = evaluation(rollout, {"pi": [True, False], "codex": [True]})
    entry = checkpoint_summary("000002-update-000004", 4, found, {"codex": 2, "opencode": 2, "pi": 2})
    assert (entry["graded"], entry["planned"], entry["pass@1"]) == (3, 6, pytest.approx(2 / 3))
    assert entry["harnesses"]["pi"]["interval"] == pytest.approx(wilson(1, 2))
    results = build_results([], [], METRICS, meta(), [entry])
    rows = {cells[1]: cells for cells in checkpoint_rows(results)}
    assert list(rows) == ["codex", "opencode", "pi", "all"]
    assert rows["opencode"] == ("000002-update-000004", "opencode", "4", "–", "–", "0/2")
    assert rows["all"][3:] == ("66.7%", "21 to 94", "3/6")
    assert "| 000002-update-000004 | pi | 4 | 50.0% | 9 to 91 | 2/2 |" in markdown_table(results)
    assert "checkpoint" not in markdown_table(build_results([], [], METRICS, meta()))

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
from pipeline.report.measures import retries
from pipeline.report.results import (
    Evaluated,
    Meta,
    build_results,
    checkpoint_summary,
    compared,
    write_results,
)
from pipeline.report.statistics import wilson
from pipeline.report.table import against_sentences, checkpoint_rows, markdown_table, print_results

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
    assert results["difference"] is None, "no headline"
    text = markdown_table(results)
    assert "The change in pass@1 is not told before every rollout is graded." in text
    assert "Provisional: rollouts graded: before 3 of 3, after 2 of 3; the same command tries the others again." in text
    assert "points" not in text.replace("change, points", "")


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


def cohort(**changes: Any) -> dict[str, Any]:
    """Two tasks, the first easy and the second hard."""
    tasks = {f"t{n}": {"content": "c", "grader": "g", "difficulty": level} for n, level in enumerate(("easy", "hard"))}
    whole = {"sha256": "tasks", "graders_sha256": "tests", "tasks": tasks, "rollouts_per_task": 2}
    return {**whole, "limits": {"max_tokens": 512}, "harnesses": {"pi": "1"}, **changes}


def both(rollout: Make, old: dict[str, Any] | None, new: dict[str, Any] | None) -> dict[str, Any]:
    side = evaluation(rollout, {"pi": [True, False, False, False]})
    known = {label: found for label, found in (("before", old), ("after", new)) if found}
    return json.loads(json.dumps(build_results(side, side, METRICS, meta(planned=4), cohorts=known)))  # type: ignore[no-any-return]


def test_the_same_cohort_is_comparable(rollout: Make) -> None:
    found = both(rollout, cohort(), cohort())
    assert (found["comparable"], found["differs"]) == (True, []) and found["difference"]["pass@1"] == 0.0
    assert (found["before"]["cohort"], found["after"]["graders"]) == ("tasks", "tests")
    older = both(rollout, None, cohort())
    assert (older["comparable"], older["before"]["cohort"]) == (None, None) and older["difference"] is not None


def test_other_tasks_or_graders_leave_no_headline(rollout: Make) -> None:
    for part, said in (("content", "tasks differ"), ("grader", "graders differ")):
        other = cohort()["tasks"] | {"t1": {"content": "c", "grader": "g", "difficulty": None, part: "x"}}
        found = both(rollout, cohort(), cohort(tasks=other))
        assert (found["comparable"], found["difference"]) == (False, None)
        assert found["differs"] == [f"{said}: 1 of 2, the first is t1"]
        assert f"The two evaluations cannot be compared: {found['differs'][0]}." in markdown_table(found)


def test_other_versions_and_limits_are_said_beside_the_headline(rollout: Make) -> None:
    found = both(rollout, cohort(), cohort(harnesses={"pi": "2"}, limits={"max_tokens": 4096}))
    assert found["comparable"] is False and found["difference"]["pass@1"] == 0.0
    said = "Not like with like: pi ran at version 1, then 2; max_tokens was 512, then 4096."
    assert said in markdown_table(found)


def test_a_comparison_of_runs_says_what_speaks_against_it(rollout: Make) -> None:
    whole = Evaluated(evaluation(rollout, {"pi": [True, False]}), 2, cohort())
    half = replace(whole, records=whole.records[:1])
    other = replace(whole, cohort=cohort(tasks={}))
    upgraded = replace(whole, cohort=cohort(harnesses={"pi": "2"}))
    assert compared(whole, half, 0)["difference"] is None and compared(whole, other, 0)["difference"] is None
    said = {
        "whole": dict(against_sentences(compared(whole, whole, 0) | {"provisional": False})),
        "half": dict(against_sentences(compared(whole, half, 0) | {"provisional": True})),
        "other": dict(against_sentences(compared(whole, other, 0) | {"provisional": False})),
        "upgraded": dict(against_sentences(compared(whole, upgraded, 0) | {"provisional": False})),
    }
    assert list(said["whole"]) == ["pi"]
    assert said["half"] == {"all": "not told before every rollout of both is graded."}
    assert said["other"] == {"all": "they cannot be compared: tasks differ: 2 of 2, the first is t0."}
    assert said["upgraded"]["all"] == "not like with like: pi ran at version 1, then 2." and "pi" in said["upgraded"]


def test_difficulty_measures_and_retries_are_shown(rollout: Make) -> None:
    before = evaluation(rollout, {"codex": [True, True, False, True], "pi": [True, False, False, False]}, calls=4)
    before = [replace(record, info={"cut": record.index, "tries": 1, "failures": []}) for record in before]
    again = replace(before[0], info=before[0].info | {"tries": 2, "failures": ["…"], "causes": ["engine"]})
    found = build_results(
        before, [], METRICS, meta(), cohorts={"before": cohort()}, retries={"before": retries([again, *before[1:]])}
    )
    assert found["before"]["difficulty"] == {
        "easy": {"pass@1": 0.75, "n": 4, "interval": list(wilson(3, 4))},
        "hard": {"pass@1": 0.25, "n": 4, "interval": list(wilson(1, 4))},
    }
    assert found["before"]["harnesses"]["pi"]["pass@k"] == {"1": 0.25, "2": 0.5}
    assert found["before"]["truncation_rate"] == 0.5 and found["before"]["calls"] == 4.0
    text = markdown_table(json.loads(json.dumps(found)))
    assert "| evaluation | harness | pass@2 | cut | own end | time-out | calls |" in text
    assert "| before | pi | 50.0% | 50.0% | 100.0% | 0.0% | 4.00 |" in text
    assert "| before | all | hard | 25.0% | 5 to 70 | 4 |" in text
    assert "before: rollouts tried more than once 1; tries without a grade: engine 1." in text
    assert "difficulty" not in markdown_table(build_results(before, [], METRICS, meta())), "no level, no table"
    stream = io.StringIO()
    print_results(found, Console(file=stream, width=80))
    assert "How rollouts ended" in stream.getvalue() and "tries without a grade" in stream.getvalue()


def test_levels_come_from_easy_to_hard_and_what_has_none_last(rollout: Make) -> None:
    levels = ("hard", "Easy", None, "medium", "own")
    tasks = {f"t{n}": {"content": "c", "grader": "g", "difficulty": level} for n, level in enumerate(levels)}
    side = [rollout(task) for task in tasks]
    found = build_results(side, [], METRICS, meta(planned=5), cohorts={"before": cohort(tasks=tasks)})
    assert list(found["before"]["difficulty"]) == ["Easy", "medium", "hard", "own", "not given"]


def test_a_checkpoint_stands_against_the_base(rollout: Make) -> None:
    old, new = ([rollout(f"t{n}", passed=n < right) for n in range(4)] for right in (1, 3))
    base = {"label": "before", **compared(Evaluated(old, 4, cohort()), Evaluated(new, 4, cohort()), 0)}
    entry = checkpoint_summary("c", 2, new, {"pi": 4}, cohort(), base)
    assert entry["base"]["difference"]["pass@1"] == 0.5 and entry["base"]["comparable"] is True
    assert entry["provisional"] is False and checkpoint_summary("c", 2, new, {"pi": 5})["provisional"] is True

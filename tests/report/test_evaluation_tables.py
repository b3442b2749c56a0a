"""Tables of evaluations: what was not measured is a dash, and what speaks against a figure is said."""

from __future__ import annotations

from typing import Any

from report_records import make_rollout

from pipeline.records import RolloutRecord
from pipeline.report.evaluation_tables import checkpoints, remarks
from pipeline.report.results import Meta, build_results, checkpoint_summary


def evaluated(solved: int, harnesses: tuple[str, ...] = ("pi", "codex")) -> list[RolloutRecord]:
    """Three tasks twice in each harness; the first rollout of the first ``solved`` tasks is right."""
    return [
        make_rollout(f"t{task}", harness, task < solved and index == 0, index=index)
        for harness in harnesses
        for task in range(3)
        for index in range(2)
    ]


def results(*checkpoints: dict[str, Any]) -> dict[str, Any]:
    meta = Meta(seed=0, rollouts=0, wall_s={}, harness_versions={}, set_aside={}, planned=12)
    return build_results([], [], [], meta, checkpoints)


def base(**changes: Any) -> dict[str, Any]:
    change = {"pass@1": 0.5, "interval": [0.25, 0.75]}
    difference = {**change, "harnesses": {"pi": change}}
    return {"label": "before", "difference": difference, "comparable": True, "differs": [], **changes}


def test_checkpoints_stand_against_the_base_and_hosted_models_beside_them() -> None:
    planned = {"pi": 6, "codex": 6}
    whole = checkpoint_summary("u6", 6, evaluated(3), planned, None, base())
    hosted = checkpoint_summary("hosted", None, evaluated(3)[:6], planned, None, base(difference=None))
    rows = list(checkpoints(results(whole, hosted)))
    assert [row[:3] for row in rows[:3]] == [("u6", "pi", "6"), ("u6", "codex", "6"), ("u6", "all", "6")]
    assert rows[0][3].startswith("50.0% of 6") and rows[0][4:] == ("6 of 6", "+50.0\n(+25.0 to +75.0)")
    assert rows[1][5] == "–", "codex was not evaluated before"
    assert rows[3][:3] == ("hosted", "pi", "–") and rows[4][3:] == ("–", "0 of 6", "–")


def test_what_speaks_against_a_figure_is_said() -> None:
    lacking = checkpoint_summary(
        "u6", 6, evaluated(3)[:5], {"pi": 6}, None, base(differs=["pi ran at version 1, then 2"])
    )
    assert list(remarks(results(lacking | {"weights": "gpt at http://h/v1"}))) == [
        ("u6", "is of gpt at http://h/v1."),
        ("u6", "provisional: 5 of 6 rollouts are graded."),
        ("u6", "not like with like, before against this: pi ran at version 1, then 2."),
    ]

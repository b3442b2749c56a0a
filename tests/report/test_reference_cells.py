"""The reference experiment's published cells through our own statistics: they give its published totals.

Of its tool calls only the savings are published: neither the counts nor how many rollouts both sides solved. So the
total cannot be computed from the parts. Held is what any counts must give: the total is the mean of the parts, weighted
by the calls before, and there are counts that give all five published figures at once.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from report_records import make_rollout

from pipeline.records import RolloutRecord
from pipeline.report.results import Meta, build_results, difference, evaluation_summary, matched_savings

TASKS = 250
HARNESSES = ("opencode", "claude-code", "codex", "mini-swe-agent")
# Training → pass@1 by harness and over all, in percent, as published; base has 998 graded cells, the others 1,000.
PUBLISHED = {
    "base": ((33.6, 33.2, 40.0, 62.1), 42.2),
    "opencode only": ((58.0, 42.0, 43.2, 66.0), 52.3),
    "four harnesses": ((49.6, 48.8, 53.6, 64.8), 54.2),
    "opencode sft": ((51.6, 33.2, 46.4, 58.8), 47.5),
    "four-harness sft": ((38.0, 42.4, 46.8, 45.2), 43.1),
}
UNGRADED = {"base": {"mini-swe-agent": 2}}
SAVED = {"opencode": 32.8, "claude-code": 28.3, "codex": 53.0, "mini-swe-agent": 16.2}
SAVED_OVERALL = 31.1


def cells(training: str) -> list[RolloutRecord]:
    """One rollout a task and harness with the published pass rates."""
    records = []
    for harness, rate in zip(HARNESSES, PUBLISHED[training][0], strict=True):
        missing = UNGRADED.get(training, {}).get(harness, 0)
        solved = round(rate / 100 * (TASKS - missing))
        outcomes: list[bool | None] = [task < solved for task in range(TASKS - missing)]
        outcomes += [None] * missing
        records += [make_rollout(f"t{task}", harness, passed) for task, passed in enumerate(outcomes)]
    return records


@pytest.mark.parametrize("training", PUBLISHED)
def test_the_published_cells_give_the_published_totals(training: str) -> None:
    found = evaluation_summary(cells(training), TASKS * len(HARNESSES))
    assert found is not None
    by_harness, overall = PUBLISHED[training]
    assert [round(100 * found["harnesses"][name]["pass@1"], 1) for name in HARNESSES] == list(by_harness)
    assert round(100 * found["pass@1"], 1) == overall
    assert found["n"] == 1000 - sum(UNGRADED.get(training, {}).values())


def own(records: list[RolloutRecord], harness: str) -> list[RolloutRecord]:
    return [record for record in records if record.harness == harness]


def with_calls(records: list[RolloutRecord], calls: dict[str, int]) -> list[RolloutRecord]:
    return [replace(record, verdict=replace(record.verdict, tool_calls=calls[record.harness])) for record in records]


def test_the_published_savings_by_harness_and_together() -> None:
    """With these calls a rollout before, every harness saves what is published, and so do all together."""
    before = {"opencode": 1000, "claude-code": 2000, "codex": 1200, "mini-swe-agent": 1000}
    after = {name: round(calls * (1 - SAVED[name] / 100)) for name, calls in before.items()}
    base, trained = with_calls(cells("base"), before), with_calls(cells("four harnesses"), after)
    whole = matched_savings(base, trained)
    parts = {name: matched_savings(own(base, name), own(trained, name)) for name in HARNESSES}
    assert {name: round(part.percent or 0.0, 1) for name, part in parts.items()} == SAVED
    assert round(whole.percent or 0.0, 1) == SAVED_OVERALL
    assert whole.n == sum(part.n for part in parts.values()) == 84 + 83 + 100 + 154
    weighted = sum((part.percent or 0.0) * part.before for part in parts.values()) / whole.before
    assert whole.percent == pytest.approx(weighted)
    assert whole.percent != pytest.approx(sum(SAVED.values()) / 4, abs=0.1), "not a mean over harnesses"


def test_a_harness_that_needs_more_calls_has_negative_savings() -> None:
    """Claude Code after training in OpenCode alone: published as −9.6%."""
    base = [make_rollout(f"t{n}", "claude-code", tool_calls=125) for n in range(4)]
    trained = [replace(record, verdict=replace(record.verdict, tool_calls=137)) for record in base]
    found = matched_savings(base, trained)
    assert round(found.percent or 0.0, 1) == -9.6
    assert found.sentence() == "9.6% more tool calls (500 → 548) where both solved the task, n = 4"


def test_the_published_gain_and_why_we_would_not_headline_it() -> None:
    """54.2 − 42.2. Two cells of the base are ungraded, so over pairs it depends on which: 11.9 to 12.1 points."""
    base, trained = cells("base"), cells("four harnesses")
    found = difference(base, trained)
    assert found is not None and found.pairs == 998 and 0.119 < found.diff < 0.122
    meta = Meta(seed=0, rollouts=0, wall_s={}, harness_versions={}, set_aside={}, planned=1000)
    results = build_results(base, trained, [], meta)
    assert results["provisional"] and results["difference"] is None


def test_only_what_both_solved_counts() -> None:
    base = [
        make_rollout("a", tool_calls=10),
        make_rollout("b", passed=False, tool_calls=50),
        make_rollout("c", tool_calls=6),
    ]
    trained = [make_rollout("a", tool_calls=4), make_rollout("b", tool_calls=1), make_rollout("c", passed=None)]
    found = matched_savings(base, trained)
    assert (found.percent, found.n) == (pytest.approx(60.0), 1)

"""The taxonomy of outcomes: every rule, their order, and that docs/outcomes.md shows the same table."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from stage_helpers import call, chain, end, left, recipe, record, trace

from pipeline.harness.base import get_harness, harness_names
from pipeline.records import Outcome
from pipeline.stages.outcome import BROKEN, FAILED, GRADED, SPOILT, End, credit, decide, harness_failed, spoilt

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "outcomes.md"
MEANINGS = ("agent_crash", "call_budget", "loop_guard", "agent_timeout", "infrastructure")
MEANS = recipe(exit_codes={**dict(zip((1, 3, 4, 5, 6), MEANINGS, strict=True)), 144: "unsolved"})

SPOILT_ENDS: list[tuple[str, End, str]] = [
    ("engine", end(trace=trace(chain(1, 0), engine_failures=1)), "the engine did not answer"),
    ("journal", end(trace=trace(chain(1, 0), journal_failures=1)), "journal could not be written"),
    ("outage", end(exit_=left(None, timed_out=True), outage=True), "while the engine was down"),
    ("outage", end(trace=trace(chain(1, 0), outages=1), exit_=left(None, timed_out=True)), "hosted one was busy"),
    ("stopped", end(exit_=left(None, killed="asked")), "Yoke stopped it"),
    ("killed", end(exit_=left(-9)), r"killed from outside \(signal 9\)"),
    ("exit_code", end(exit_=left(6), recipe=MEANS), "exit 6"),
    ("unanswered", end([], left(1), output="cannot find module x"), r"no answer \(exit 1\): cannot find module x"),
    ("unanswered", end(chain(1, delivered=False)), "got no answer"),
    ("unanswered", end([], left(None, timed_out=True)), "got no answer"),
    ("foreign", end([call(0, None, foreign=True)]), "none of 1 answers was to the harness itself"),
]


@pytest.mark.parametrize(("cause", "ended", "reason"), SPOILT_ENDS)
def test_what_the_infrastructure_spoilt_is_not_graded(cause: str, ended: End, reason: str) -> None:
    found = spoilt(ended)
    assert found is not None and (found.outcome, found.cause) == (Outcome.INFRASTRUCTURE, cause)
    assert re.search(reason, found.reason)


def test_every_cause_is_tried() -> None:
    assert {cause for cause, _, _ in SPOILT_ENDS} == {rule.cause for rule in SPOILT}


@pytest.mark.parametrize(
    "ended",
    [
        end(),
        end(exit_=left(1)),
        end(exit_=left(None, timed_out=True)),
        end(outage=True),  # it ended by itself: the outage did no harm
        end([], trace=trace([], over_budget=1)),
        end([call(0, None, 1), call(1, 0, foreign=True)]),
        end(exit_=left(1), recipe=MEANS),
    ],
    ids=range(7),
)
def test_what_the_agent_answers_for_is_graded(ended: End) -> None:
    assert spoilt(ended) is None


MIDDLE = chain(1, 1)  # the last answer asks for a tool call
ENDS: list[tuple[End, Outcome, str]] = [
    (end(), Outcome.UNSOLVED, ""),
    (end(exit_=left(None, timed_out=True)), Outcome.AGENT_TIMEOUT, "stopped after 3 s"),
    *((end(exit_=left(None, killed=k)), Outcome.AGENT_CRASH, f"limit of {k}") for k in ("memory", "processes", "disk")),
    (end(trace=trace(chain(1, 0), over_budget=2)), Outcome.CALL_BUDGET, "budget was used up"),
    (end(exit_=left(3), recipe=MEANS), Outcome.CALL_BUDGET, "exit 3"),
    (end(guarded=True), Outcome.LOOP_GUARD, "guard against loops"),
    (end(exit_=left(4), recipe=MEANS), Outcome.LOOP_GUARD, "exit 4"),
    (end(exit_=left(5), recipe=MEANS), Outcome.AGENT_TIMEOUT, "exit 5"),
    (end(exit_=left(139)), Outcome.AGENT_CRASH, "ended by SIGSEGV"),
    (end(MIDDLE, left(137)), Outcome.AGENT_CRASH, "ended by SIGKILL"),
    (end(MIDDLE, left(1)), Outcome.AGENT_CRASH, "exit 1 after an answer that asked for a tool call"),
    (end([*chain(1), call(1, 0, foreign=True)], left(2)), Outcome.AGENT_CRASH, "asked for a tool call"),
    (end([*MIDDLE, call(2, 1, delivered=False)], left(2)), Outcome.AGENT_CRASH, "asked for a tool call"),
    (end(exit_=left(1), recipe=MEANS), Outcome.AGENT_CRASH, "exit 1"),
    (end(exit_=left(1)), Outcome.UNSOLVED, "exit 1"),  # it was done talking
    (end(MIDDLE), Outcome.UNSOLVED, ""),  # 0 is no crash: several harnesses end so at their own limits
    (end(MIDDLE, left(144), recipe=MEANS), Outcome.UNSOLVED, "exit 144"),
    (end(exit_=left(143), recipe=recipe(exit_codes={143: "unsolved"})), Outcome.UNSOLVED, "exit 143"),  # no signal
    (end(trace=trace(MIDDLE, context_full=1), exit_=left(1), recipe=MEANS), Outcome.UNSOLVED, "window was full"),
    (end(trace=trace(chain(1, 0), context_full=1)), Outcome.UNSOLVED, ""),  # it compacted and went on
    # two at once: the earlier row decides
    (end(guarded=True, trace=trace(MIDDLE, over_budget=1), exit_=left(1)), Outcome.CALL_BUDGET, "budget"),
    (end(guarded=True, exit_=left(None, timed_out=True)), Outcome.AGENT_TIMEOUT, "stopped"),
    (end(MIDDLE, left(134), trace=trace(MIDDLE, context_full=1)), Outcome.AGENT_CRASH, "SIGABRT"),
]


def worth(ended: End, correctness: float) -> tuple[Outcome, str]:
    decision = decide(replace(ended, correctness=correctness))
    return decision.outcome, decision.reason


@pytest.mark.parametrize(("ended", "outcome", "reason"), ENDS, ids=range(len(ENDS)))
def test_an_unsolved_workspace(ended: End, outcome: Outcome, reason: str) -> None:
    for correctness in (0.0, 0.5):
        assert worth(ended, correctness)[0] is outcome
        assert reason in worth(ended, correctness)[1] and bool(reason) == bool(worth(ended, correctness)[1])


@pytest.mark.parametrize("ended", [ended for ended, _, _ in ENDS], ids=range(len(ENDS)))
def test_a_solved_workspace_is_solved_unless_the_harness_had_to_be_stopped(ended: End) -> None:
    stopped = ended.exit.timed_out or ended.exit.killed
    assert (worth(ended, 1.0)[0] is Outcome.SOLVED) == (not stopped)


def test_who_was_stopped_or_broke_down_gets_nothing() -> None:
    assert {outcome for outcome in Outcome if credit(outcome, 0.5) == 0.0} == FAILED
    assert credit(Outcome.CALL_BUDGET, 0.5) == credit(Outcome.LOOP_GUARD, 0.5) == 0.5


@pytest.mark.parametrize(
    ("causes", "failed"),
    [
        (["unanswered"] * 3, True),
        (["sandbox", "installation", "foreign"], True),
        (["unanswered"] * 2, False),  # two of four are enough
        (["engine"] * 4, False),
        (["engine", "verifier", "unanswered", "unanswered"], False),  # without the shared trouble two would be graded
        (["engine", "unanswered", "unanswered", "unanswered"], True),
    ],
)
def test_a_harness_is_blamed_only_for_its_own_failures(causes: list[str], failed: bool) -> None:
    bad = [record(Outcome.INFRASTRUCTURE, cause=cause) for cause in causes]
    assert harness_failed([*bad, *(record() for _ in range(4 - len(bad)))], 4) is failed


def test_what_recipes_mean_by_exit_codes_are_outcomes() -> None:
    for name in harness_names():
        found = get_harness(name)
        assert set(found.exit_codes.values()) <= set(Outcome) - {Outcome.SOLVED}, name
        assert 0 not in found.exit_codes, f"{name}: an exit code of 0 says nothing"
        for expression in (found.loop_guard, found.tool_log):
            re.compile(expression.encode())


def test_the_guide_shows_the_same_tables() -> None:
    cells = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in GUIDE.read_text().splitlines()]
    rows = [row for row in cells if len(row) >= 3 and row[1] in set(Outcome)]
    blame = {True: "shared", False: "harness"}
    wanted = [[rule.when, "infrastructure", rule.cause, blame[rule.shared]] for rule in SPOILT]
    wanted += [[when, "infrastructure", cause, blame[shared]] for cause, (when, shared) in BROKEN.items()]
    wanted += [[rule.when, rule.outcome, "0" if rule.outcome in FAILED else "verifier's"] for rule in GRADED]
    assert rows == wanted

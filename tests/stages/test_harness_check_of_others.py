"""A harness from outside, in one file as docs/harnesses.md says: Aider, which has no tools and no shell."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cli import compose_config
from pipeline.harness import base, get_harness
from pipeline.harness.base import Action, HarnessRecipe
from pipeline.harness.install import install
from pipeline.stages.harness_check import check_scripted
from pipeline.stages.harness_check_result import Result
from pipeline.stages.harness_check_scenes import SCENES, plays
from pipeline.stages.harness_check_stage import TOGETHER

AIDER = Path(__file__).parents[1] / "harness" / "recipes" / "aider.py"
DOCS = Path(__file__).parents[2] / "docs" / "harnesses.md"


@pytest.fixture
def aider() -> Iterator[HarnessRecipe]:
    """Its recipe, registered as `harness.recipes` registers it."""
    base.register(compose_config([f"harness.recipes=[{AIDER}]"]).harness.recipes)
    yield get_harness("aider")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_aider_keeps_the_contract(aider: HarnessRecipe) -> None:
    assert install(["aider"], base.harness_root()) == {}
    (results,) = check_scripted(compose_config([]), [aider], _silent).values()
    assert [f"{result.scene}: {line}" for result in results for line in result.failures] == []
    assert {result.scene for result in results} == {"calls", "mistakes", "cut", "faults", "hang", TOGETHER}
    facts = {result.scene: result.facts for result in results}
    assert facts["calls"]["tool_calls_logged"] == 9  # files that it wrote
    assert facts["calls"]["side_calls"] == 0
    assert facts["mistakes"]["fates"]["malformed"] != "ends"


def _silent(harness: str, scene: str, result: Result | None) -> None:
    """Tell nobody."""


def test_the_docs_show_the_recipe_that_is_tested() -> None:
    assert f"```python\n{AIDER.read_text()}```" in DOCS.read_text()


@pytest.mark.parametrize("scene", ["calls", "mistakes", "cut", "faults"])
def test_all_actions_are_one_answer_where_the_first_ends_the_run(scene: str, aider: HarnessRecipe) -> None:
    (play,) = plays(SCENES[scene], aider, f"{scene}-1", lambda: None)
    (acting,) = [step for step in play.steps if step.parts]
    assert {f"{name}\n```" for name in SCENES[scene].files} <= {part[: part.index("```") + 3] for part in acting.parts}
    assert all(part in acting.answer.text for part in acting.parts)
    assert [step.name for step in play.steps if step.last] == [
        step.name for step in play.steps[play.steps.index(acting) + 1 :]
    ]


def test_a_harness_without_a_shell_that_goes_on_gets_one_file_after_the_other(aider: HarnessRecipe) -> None:
    patient = dataclasses.replace(aider, finish=(Action(text="Done."),))
    (play,) = plays(SCENES["calls"], patient, "calls-1", lambda: None)
    assert len(play.steps) == 8
    assert "42" in play.steps[0].answer.text and "two.txt" in play.steps[1].answer.text

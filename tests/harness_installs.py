"""Harnesses for tests: installed, or the test is skipped where the machine lacks what no package brings."""

from __future__ import annotations

import pytest

from pipeline.harness.base import HarnessRecipe, get_harness, harness_root
from pipeline.harness.install import install


def runnable(name: str) -> HarnessRecipe:
    """Its recipe. Skips, with the reason in the report, where Python 3.12 or tmux is missing."""
    recipe = get_harness(name)
    if missing := recipe.missing():
        pytest.skip(f"{name} cannot run here: {missing}")
    return recipe


def provided(name: str) -> HarnessRecipe:
    """The same, installed."""
    recipe = runnable(name)
    assert install([name], harness_root()) == {}
    return recipe

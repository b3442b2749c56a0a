"""`yoke harness check`: the contract that every harness must keep, against a scripted engine and a real vLLM.

The scenes are in ``harness_check_scenes``, what must hold in ``harness_check_verdict``.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pipeline.config import Config
from pipeline.harness.base import HarnessRecipe, get_harness, harness_root
from pipeline.harness.install import install
from pipeline.stages.harness_check_result import Result, entry_of, keep, results_place
from pipeline.stages.harness_check_scenes import SCENES
from pipeline.stages.harness_check_stage import TOGETHER, Stage
from pipeline.stages.harness_check_view import View


def check_harnesses(config: Config, names: Sequence[str]) -> int:
    """Install what is missing, check every harness, keep the results. Returns the exit code: 1 unless all pass."""
    with View(names, [*SCENES, TOGETHER]) as view:
        absent = install(names, harness_root(config.harness.home), view.say)
        recipes = [get_harness(name) for name in names if name not in absent]
        results = check_scripted(config, recipes, view)
    entries = {recipe.name: entry_of(recipe, results[recipe.name]) for recipe in recipes}
    keep(entries, results_place())
    failures = [f"{name}: {line}" for name, entry in entries.items() for line in entry["failures"]]
    failures += [f"{name}: not checked: {reason.splitlines()[0]}" for name, reason in absent.items()]
    for line in failures:
        print(line, flush=True)
    passed = sum(not entry["failures"] for entry in entries.values())
    print(f"{passed} of {len(names)} passed; results: {results_place()}", flush=True)
    return 1 if failures else 0


def check_scripted(config: Config, recipes: Sequence[HarnessRecipe], view: View) -> dict[str, list[Result]]:
    """The scenes of every harness, one harness after the other."""

    async def check(recipe: HarnessRecipe) -> list[Result]:
        with tempfile.TemporaryDirectory(prefix="yoke-check-", ignore_cleanup_errors=True) as scratch:
            return await Stage(config, recipe, Path(scratch), partial(view.tell, recipe.name)).play_all()

    return {recipe.name: asyncio.run(check(recipe)) for recipe in recipes}

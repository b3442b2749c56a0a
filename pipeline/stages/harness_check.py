"""`yoke harness check`: the contract that every harness must keep, against a scripted engine and a real vLLM.

The scenes are in ``harness_check_scenes``, what must hold in ``harness_check_verdict``.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pipeline.capture import supervisor
from pipeline.capture.shard_process import CaptureError
from pipeline.config import Config
from pipeline.engine.server import EngineError
from pipeline.engine.transfer import TransferError
from pipeline.harness.base import Action, HarnessRecipe, get_harness, harness_root
from pipeline.harness.install import install
from pipeline.stages.harness_check_real import REAL, check_real
from pipeline.stages.harness_check_result import Result, Tell, entry_of, keep, results_place
from pipeline.stages.harness_check_scenes import SCENES
from pipeline.stages.harness_check_stage import TOGETHER, Stage
from pipeline.stages.harness_check_view import View

COLUMNS = (*SCENES, TOGETHER, REAL)
SPEECHLESS = "its recipe has no `shell` and no `write`: no scripted model can make it act"
T = TypeVar("T")


def check_harnesses(config: Config, names: Sequence[str]) -> int:
    """Install what is missing, check every harness, keep the results. Returns the exit code: 1 unless all pass."""
    with View(names, COLUMNS) as view:
        absent = install(names, harness_root(config.harness.home), view.say)
        absent |= {name: SPEECHLESS for name in names if get_harness(name).acts_by == Action()}
        recipes = [get_harness(name) for name in names if name not in absent]
        results = check_scripted(config, recipes, view.tell)
        for name, result in check_on_vllm(config, recipes, view.tell).items():
            results[name].append(result)
    entries = {recipe.name: entry_of(recipe, results[recipe.name]) for recipe in recipes}
    keep(entries, results_place())
    failures = [f"{name}: {line}" for name, entry in entries.items() for line in entry["failures"]]
    failures += [f"{name}: not checked: {reason.splitlines()[0]}" for name, reason in absent.items()]
    for line in failures:
        print(line, flush=True)
    passed = sum(not entry["failures"] for entry in entries.values())
    print(f"{passed} of {len(names)} passed; results: {results_place()}", flush=True)
    return 1 if failures else 0


def check_scripted(config: Config, recipes: Sequence[HarnessRecipe], tell: Tell) -> dict[str, list[Result]]:
    """The scenes of every harness against the scripted engine, one harness after the other."""
    logging.getLogger(supervisor.__name__).setLevel(logging.ERROR)  # it tells of shards that a scene kills
    return {recipe.name: _in_scratch(partial(_scenes, config, recipe, tell)) for recipe in recipes}


async def _scenes(config: Config, recipe: HarnessRecipe, tell: Tell, scratch: Path) -> list[Result]:
    return await Stage(config, recipe, scratch, tell).play_all()


def check_on_vllm(config: Config, recipes: Sequence[HarnessRecipe], tell: Tell) -> dict[str, Result]:
    """A rollout of every harness on one real vLLM. When that does not start, no harness passes."""
    if not recipes:
        return {}
    try:
        return _in_scratch(lambda scratch: check_real(config, recipes, scratch, tell))
    except (EngineError, TransferError, CaptureError) as error:
        return {recipe.name: Result(REAL, (str(error).replace("\n", " "),), {}) for recipe in recipes}


def _in_scratch(work: Callable[[Path], Coroutine[Any, Any, T]]) -> T:
    with tempfile.TemporaryDirectory(prefix="yoke-check-", ignore_cleanup_errors=True) as scratch:
        return asyncio.run(work(Path(scratch)))

"""`yoke harness list | install | check | table | lock`: the coding agents of this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pipeline.config import Config, UserError
from pipeline.harness.base import HarnessRecipe, get_harness, harness_names, harness_root, load_with_module, lock_place
from pipeline.harness.install import install, installed

ALL = "--all"


def run(config: Config, words: Sequence[str]) -> int:
    """Do what the first word says with the harnesses that the others name. Returns the exit code."""
    actions = {"list": _list, "install": _install, "check": _check, "table": _table, "lock": _lock}
    action, *names = words or ["list"]
    if action not in actions:
        raise UserError(f"harness {action}: it takes one of {', '.join(actions)}")
    if action != "list" and not names:
        raise UserError(f"harness {action} needs names, or {ALL}; known: {', '.join(harness_names())}")
    if flags := [word for word in names if word.startswith("-") and word != ALL]:
        raise UserError(f"harness {action} does not know {flags[0]}")
    chosen = harness_names() if ALL in names else names
    for name in chosen:
        get_harness(name)  # an unknown one is told before anything is done
    return actions[action](config, chosen)


def _list(config: Config, names: Sequence[str]) -> int:
    root = harness_root(config.harness.home)
    table = Table("harness", "version", "dialect", "state", box=None, pad_edge=False)
    for recipe in map(get_harness, names or harness_names()):
        table.add_row(recipe.name, recipe.version, recipe.dialect, _state(recipe, root))
    Console().print(table)
    return 0


def _state(recipe: HarnessRecipe, root: Path) -> str:
    if missing := recipe.missing():
        return missing
    if installed(recipe.name, root):
        return "installed"
    found = recipe.packaging.version(root / recipe.installed_as)
    return "not installed" if found is None else f"version {found} is installed"


def _install(config: Config, names: Sequence[str]) -> int:
    return 2 if install(names, harness_root(config.harness.home), lambda line: print(line, flush=True)) else 0


def _check(config: Config, names: Sequence[str]) -> int:
    from pipeline.stages.harness_check import check_harnesses

    return check_harnesses(config, names)


def _table(config: Config, names: Sequence[str]) -> int:
    """Write docs/harness-table.md from what `check` found out."""
    from pipeline.stages.harness_check_result import read, results_place
    from pipeline.stages.harness_check_table import write_table

    print(write_table(read(results_place()), names), flush=True)
    return 0


def _lock(config: Config, names: Sequence[str]) -> int:
    """Write the locks of recipes anew, beside the recipes, and tell what changed by leaving it to git."""
    for name in names:
        module, recipe = load_with_module(name)
        place = lock_place(module, recipe)
        with tempfile.TemporaryDirectory() as scratch:
            draft = Path(scratch) / name
            draft.mkdir()
            recipe.packaging.lock(recipe.version, draft)
            place.mkdir(parents=True, exist_ok=True)
            for file in draft.iterdir():
                if file.is_file():
                    (place / file.name).write_bytes(file.read_bytes())
        print(f"{name} {recipe.version}: {place}", flush=True)
    return 0

"""Installs harnesses, each below its own directory, from lock files: exact versions, checked by hash.

``python -m pipeline.harness.install [--root DIR] NAME...``; without names, every harness.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.config import UserError
from pipeline.harness.base import HarnessRecipe, get_harness, harness_names, harness_root, locks_of
from pipeline.harness.warm import warm_up

MARKER = "installed.json"
DRAFT_S = 6 * 3600.0
FULL_BYTES = 16 << 20

logger = logging.getLogger(__name__)


def install(names: Iterable[str], root: Path, tell: Callable[[str], None] = lambda line: None) -> dict[str, str]:
    """Install what is not yet there at its pinned version. Two at once are safe: the first to finish is kept.

    One that fails does not keep the others from being installed. Returns why, by name: what the machine lacks, or the
    installer's last lines. ``tell`` gets a line for each harness. Raises UserError for an unknown name.
    """
    failures = {}
    for recipe in [get_harness(name) for name in names]:
        try:
            tell(f"{recipe.name} {recipe.version}: {_provide(recipe, root)}")
        except (UserError, OSError) as error:
            failures[recipe.name] = str(error)
            tell(f"{recipe.name} {recipe.version}: NOT installed: {error}")
    return failures


def _provide(recipe: HarnessRecipe, root: Path) -> str:
    if missing := recipe.missing():
        raise UserError(missing)
    if installed(recipe.name, root):
        return f"is installed in {root / recipe.installed_as}"
    _install(recipe, root)
    return f"installed in {root / recipe.installed_as}"


def installed(name: str, root: Path) -> bool:
    """Whether the harness lies below ``root``, whole, as its recipe wants it."""
    recipe = get_harness(name)
    prefix = root / recipe.installed_as
    with suppress(OSError, ValueError, KeyError):
        marker = json.loads((prefix / MARKER).read_text())
        return bool(marker == _marker(recipe) and recipe.packaging.version(prefix) == recipe.version)
    return False


def _marker(recipe: HarnessRecipe) -> dict[str, Any]:
    """What a whole installation says of itself. A compile cache serves only the flags of Node that filled it."""
    marker: dict[str, Any] = {"name": recipe.installed_as, "version": recipe.version}
    if recipe.warm_up:
        marker["warmed"] = list(recipe.argv)
    return marker


def _install(recipe: HarnessRecipe, root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    _sweep(root)
    lock = locks_of(recipe.name)
    if lock is None:
        logger.warning("%s has no lock: all that it needs is taken at today's newest version", recipe.name)
    with tempfile.TemporaryDirectory(dir=root, prefix=f".{recipe.installed_as}-", ignore_cleanup_errors=True) as draft:
        prefix = Path(draft) / recipe.installed_as
        prefix.mkdir()
        try:
            _fill(recipe, prefix, lock)
        except (UserError, OSError) as error:
            if shutil.disk_usage(root).free < FULL_BYTES:  # installers tell it in many ways, or not at all
                raise UserError(f"no space is left in {root}") from error
            raise
        if recipe.warm_up:
            warm_up(recipe, Path(draft))
        (prefix / MARKER).write_text(json.dumps(_marker(recipe)) + "\n")
        _publish(recipe, prefix, root / recipe.installed_as, Path(draft) / "old")
    if not installed(recipe.name, root):
        raise UserError(f"it was installed, but could not be put into its place {root / recipe.installed_as}")


def _fill(recipe: HarnessRecipe, prefix: Path, lock: Path | None) -> None:
    recipe.packaging.install(prefix, recipe.version, lock)
    found = recipe.packaging.version(prefix)
    if found != recipe.version:
        wanted = f"{recipe.packaging.package} {recipe.version}"
        raise UserError(f"{lock or 'the installer'} gave {found}, not {wanted}: is its lock an older one's?")


def _sweep(root: Path) -> None:
    """Remove what killed installs left, once it is too old to belong to a living one."""
    for draft in root.glob(".*-*"):
        with suppress(OSError):  # another one sweeps too
            if time.time() - draft.stat().st_mtime > DRAFT_S:
                shutil.rmtree(draft, ignore_errors=True)


def _publish(recipe: HarnessRecipe, prefix: Path, place: Path, old: Path) -> None:
    """Put a finished installation into place of an older one, or leave an equal one of another installer."""
    if not installed(recipe.name, place.parent):
        with suppress(FileNotFoundError):
            os.rename(place, old)
    with suppress(OSError):  # not empty: another installer was faster
        os.rename(prefix, place)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.harness.install", description=__doc__)
    parser.add_argument("names", nargs="*", default=harness_names())
    parser.add_argument("--root", type=Path, default=None)
    options = parser.parse_args(argv)
    try:
        failures = install(options.names, harness_root(options.root), print)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 2 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

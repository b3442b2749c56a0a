"""Installs harnesses, each below its own directory, from the committed lock files: exact versions, checked by hash.

``python -m pipeline.harness.install [--root DIR] NAME...``; without names, every harness.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pipeline.config import UserError
from pipeline.harness.base import DEFAULT_ROOT, HarnessRecipe, get_harness, harness_names
from pipeline.harness.node import find_node
from pipeline.harness.warm import warm_up

LOCKS = Path(__file__).parent / "locks"
INSTALL_S = 900.0
MARKER = "installed.json"


def install(names: Iterable[str], root: Path = DEFAULT_ROOT) -> None:
    """Install what is not yet there at its pinned version. Two at once are safe: the first to finish is kept.

    Raises UserError for an unknown name and when npm fails (with its last lines).
    """
    for recipe in [get_harness(name) for name in names]:
        if not installed(recipe.name, root):
            _install(recipe, root.expanduser())


def installed(name: str, root: Path = DEFAULT_ROOT) -> bool:
    """Whether the harness lies below ``root`` at the version that its recipe pins."""
    recipe = get_harness(name)
    prefix = root.expanduser() / name
    with suppress(OSError, ValueError):
        marker = json.loads((prefix / MARKER).read_text())
        package = json.loads((prefix / "node_modules" / recipe.package / "package.json").read_text())
        return bool(marker["version"] == package["version"] == recipe.version)
    return False


def _install(recipe: HarnessRecipe, root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=f".{recipe.name}-") as scratch:
        prefix = Path(scratch) / recipe.name
        prefix.mkdir()
        for file in ("package.json", "package-lock.json"):
            shutil.copy(LOCKS / recipe.name / file, prefix)
        _npm_ci(prefix)
        if recipe.warm_up:
            warm_up(recipe, Path(scratch))
        (prefix / MARKER).write_text(json.dumps({"name": recipe.name, "version": recipe.version}) + "\n")
        _publish(prefix, root / recipe.name, Path(scratch) / "old")
    if not installed(recipe.name, root):
        raise UserError(f"npm ended well, but {root / recipe.name} does not hold {recipe.package} {recipe.version}")


def _npm_ci(prefix: Path) -> None:
    node = find_node()
    argv = [str(node.binary), str(node.npm), "ci", "--no-audit", "--no-fund", "--prefer-offline"]
    path = f"{node.binary.parent}:{os.environ.get('PATH', '/usr/bin:/bin')}"
    done = subprocess.run(
        argv,
        cwd=prefix,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=INSTALL_S,
        check=False,
    )
    if done.returncode:
        lines = "\n".join(done.stdout.strip().splitlines()[-8:])
        raise UserError(f"npm ci failed (exit {done.returncode}) for {prefix.name}; its last lines:\n{lines}")


def _publish(prefix: Path, place: Path, old: Path) -> None:
    """Put a finished installation into place of an older one, or leave an equal one of another installer."""
    if not installed(place.name, place.parent):
        with suppress(FileNotFoundError):
            os.rename(place, old)
    with suppress(OSError):  # not empty: another installer was faster
        os.rename(prefix, place)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.harness.install", description=__doc__)
    parser.add_argument("names", nargs="*", default=harness_names())
    parser.add_argument("--root", type=Path, default=DEFAULT_ROOT)
    options = parser.parse_args(argv)
    try:
        install(options.names, options.root)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for name in options.names:
        print(f"{name} {get_harness(name).version}: {options.root.expanduser() / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

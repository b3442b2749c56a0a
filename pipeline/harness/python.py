"""Which Python a harness's environment is made of: the newest that the machine has, of those that the harness takes."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from pipeline.config import UserError

NEWEST = (3, 14)
VARIABLE = "YOKE_PYTHON"
ASK_S = 30.0


@functools.cache
def find_python(oldest: tuple[int, int], newest: tuple[int, int] = NEWEST) -> Path:
    """The oldest fitting interpreter: the one that YOKE_PYTHON names, else this one, on PATH, or of pyenv or uv.

    Raises UserError, in one line, when there is none.
    """
    found = sorted({(version, path) for path in _candidates() if oldest <= (version := _version(path)) <= newest})
    if not found:
        raise UserError(
            f"no Python {'.'.join(map(str, oldest))} or newer, which no package brings: install one (a system package, "
            f"pyenv, `uv python install`), or name one in {VARIABLE}"
        )
    return found[0][1]


def base_prefix(python: Path) -> Path:
    """The installation behind ``python``, which is a link into it or an interpreter in it."""
    return python.resolve().parent.parent


def _candidates() -> Iterator[Path]:
    if named := os.environ.get(VARIABLE):
        yield Path(named).resolve()
        return
    yield Path(os.path.realpath(sys.executable))
    names = [f"python3.{minor}" for minor in range(11, NEWEST[1] + 1)]
    for name in names:
        if path := shutil.which(name):
            yield Path(path).resolve()
        for folder in (Path("~/.pyenv/versions"), Path("~/.local/share/uv/python"), Path("/opt"), Path("/usr/local")):
            yield from (path.resolve() for path in folder.expanduser().glob(f"*/bin/{name}"))


@functools.cache
def _version(python: Path) -> tuple[int, ...]:
    """(major, minor), asked of the interpreter; (0,) for what does not run, such as pyenv's stand-ins."""
    words = "import sys, ensurepip; print(sys.version_info[0], sys.version_info[1])"
    try:
        done = subprocess.run([python, "-I", "-c", words], capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return (0,)
    return tuple(int(number) for number in re.findall(r"\d+", done.stdout)) if done.returncode == 0 else (0,)

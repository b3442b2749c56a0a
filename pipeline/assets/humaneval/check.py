"""Runs a problem's tests here and the agent's function in another process: check.py WORKSPACE REWARD.

The other process sees one call's arguments after the other and gives back values. It can write to no file, so neither
can it write a reward; a value is read as a Python literal, so it cannot be an object that equals everything.
"""

from __future__ import annotations

import ast
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TOTAL_S = 45
LONGEST = 1 << 24  # bytes of one value


class Remote:
    """Calls the agent's function by pipe."""

    def __init__(self, workspace: str, entry: str) -> None:
        command = [sys.executable, "-I", "-B", str(HERE / "answers.py"), entry]
        self._process = subprocess.Popen(
            command, cwd=workspace, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def __call__(self, *arguments: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(repr(arguments).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline(LONGEST)
        if not line:
            raise AssertionError("the function's process ended")
        kind, value = ast.literal_eval(line.decode())
        if kind != "value":
            raise AssertionError(value)
        return value

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def main(workspace: str, reward: str) -> None:
    """Write 1 over the 0 in ``reward`` if every test passes."""
    problem = json.loads((HERE / "problem.json").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    exec(problem["prompt"], names)  # some tests use a helper that the problem gives
    exec(problem["test"], names)
    signal.alarm(TOTAL_S)
    remote = names[problem["entry_point"]] = Remote(workspace, problem["entry_point"])  # some tests call it by its name
    try:
        names["check"](remote)
    finally:
        remote.end()
    Path(reward).write_text("1\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

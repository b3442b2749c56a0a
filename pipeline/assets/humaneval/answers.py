"""Loads the agent's answer.py from the working directory and answers calls of one of its functions: answers.py NAME.

A line in is the arguments, a line out is ("value", result) or ("error", text), all as Python literals.
"""

from __future__ import annotations

import ast
import os
import resource
import sys
from typing import Any

PLAIN: tuple[Any, ...] = (bool, int, float, complex, str, bytes)


def main(name: str) -> None:
    """Answer until the input ends."""
    calls, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the agent's code may read and print, but not in between
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    sys.path.insert(0, os.getcwd())
    names: dict[str, Any] = {"__name__": "answer"}
    with open("answer.py", encoding="utf-8") as file:
        exec(compile(file.read(), "answer.py", "exec"), names)
    for line in calls:
        try:
            answer = ("value", plain(names[name](*ast.literal_eval(line))))
        except Exception as error:
            answer = ("error", f"{type(error).__name__}: {error}")
        answers.write(f"{answer!r}\n")
        answers.flush()


def plain(value: Any) -> Any:
    """The value as Python's own types, where it is of a kind derived from one: a Counter is a dict."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return kind(plain(item) for item in value)
    return next((kind(value) for kind in PLAIN if isinstance(value, kind)), value)


if __name__ == "__main__":
    main(sys.argv[1])

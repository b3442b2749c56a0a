"""`yoke tasks WORD`: the task set that the settings name, looked at without a run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.config import Config, UserError
from pipeline.launch.data import load_split
from pipeline.launch.environments import build
from pipeline.launch.gates import SOUND, check_all, inspect_files
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.snapshot import with_absolute_paths
from pipeline.stages.integrity import check_gates, inspect
from pipeline.tasks.harbor import HarborTask
from pipeline.tasks.sets import describe


def run(config: Config, words: Sequence[str]) -> int:
    """Do what the one word asks for. Raises UserError for another word, and for a set that cannot be had."""
    if words[:1] == ["build"]:
        return build(with_absolute_paths(config), words[1:])
    if len(words) != 1 or words[0] not in WORDS:
        raise UserError(
            f"yoke tasks {' | '.join((*WORDS, 'build [--list]'))}, then settings (tasks=harbor tasks.train=DIR …)"
        )
    config = with_absolute_paths(config)
    check_gates(config.tasks.gates)
    with tempfile.TemporaryDirectory(prefix="yoke-tasks-") as scratch:
        return WORDS[words[0]](config, RunDirectory(Path(scratch)))


def _list(config: Config, place: RunDirectory) -> int:
    """How many tasks there are, and everything that their files give away."""
    train, test = _splits(config, place)
    print(f"train: {describe(train)}\ntest:  {describe(test)}")
    for finding in inspect(train, test, config.tasks.gates):
        print(f"{getattr(config.tasks.gates, finding.kind)}: {finding.text}")
    return 0


def _check(config: Config, place: RunDirectory) -> int:
    """The files, then the oracle and an idle agent on every task."""
    train, test = _splits(config, place)
    inspect_files(config, train, test)
    without = sum(task.solution is None for task in (*train, *test))
    count = check_all(config, place)
    print(f"{count} tasks: {SOUND} ({without} have no solution to try)")
    return 0


def _splits(config: Config, place: RunDirectory) -> tuple[list[HarborTask], list[HarborTask]]:
    """A set by itself is looked at without the other, which ``yoke tasks`` does not ask for."""
    train = load_split(config, place, "train")
    return train, [] if config.tasks.kind == "harbor" and not config.tasks.test else load_split(config, place, "test")


WORDS: dict[str, Callable[[Config, RunDirectory], int]] = {"list": _list, "check": _check}

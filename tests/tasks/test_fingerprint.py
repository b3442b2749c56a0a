"""A task's hashes change with what the agent meets or what grades it, and with nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.tasks.fingerprint import content_hash, difficulty_level, grader_hash
from pipeline.tasks.harbor import load_task

TOML = """
schema_version = "1.4"
[metadata]
gold_answer = "42"
difficulty = "hard"
tags = ["csv"]
[verifier]
timeout_sec = 12.5
[agent]
timeout_sec = 30
[environment]
cpus = 2
"""
FILES = {
    "task.toml": TOML,
    "instruction.md": "Write 42 to answer.txt.\n",
    "environment/data/list.txt": "42\n",
    "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
    "solution/solve.sh": "echo 42 > answer.txt\n",
}
Change = Callable[[Path], object]


def make_task(root: Path) -> Path:
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def hashes(root: Path) -> tuple[str, str]:
    task = load_task(root)
    return content_hash(task), grader_hash(task)


def in_toml(old: str, new: str) -> Change:
    return lambda root: (root / "task.toml").write_text(TOML.replace(old, new))


def write(name: str, text: str = "other\n") -> Change:
    return lambda root: (root / name).write_text(text)


CHANGES: dict[str, tuple[Change, bool, bool]] = {  # (change, of the content, of the grader)
    "instruction": (write("instruction.md"), True, False),
    "data": (write("environment/data/list.txt"), True, False),
    "more data": (write("environment/data/more.txt", ""), True, False),
    "name of data": (
        lambda root: (root / "environment/data/list.txt").rename(root / "environment/data/l"),
        True,
        False,
    ),
    "mode of data": (lambda root: (root / "environment/data/list.txt").chmod(0o755), True, False),
    "link": (lambda root: (root / "environment/link").symlink_to("data"), True, False),
    "limit": (in_toml("timeout_sec = 30", "timeout_sec = 31"), True, False),
    "machine": (in_toml("cpus = 2", "cpus = 4"), True, False),
    "test": (write("tests/test.sh", "echo 0 > /logs/verifier/reward.txt\n"), False, True),
    "helper of a test": (write("tests/expected.json"), False, True),
    "time of the verifier": (in_toml("timeout_sec = 12.5", "timeout_sec = 13"), False, True),
    "gold answer": (in_toml('"42"', '"43"'), False, True),
    "solution": (write("solution/solve.sh"), False, False),
    "words about it": (in_toml('tags = ["csv"]', 'tags = ["sql"]\nauthor_name = "A"'), False, False),
    "level": (in_toml('"hard"', '"easy"'), False, False),
    "form of task.toml": (in_toml("cpus = 2", "cpus    = 2  # two"), False, False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_a_hash(tmp_path: Path, name: str) -> None:
    change, of_content, of_grader = CHANGES[name]
    before = hashes(make_task(tmp_path / "task"))
    change(tmp_path / "task")
    content, grader = hashes(tmp_path / "task")
    assert ((content != before[0]), (grader != before[1])) == (of_content, of_grader)


def test_where_a_task_lies_does_not_matter(tmp_path: Path) -> None:
    place = make_task(tmp_path / "a" / "task")
    shutil.copytree(place, tmp_path / "other")
    assert hashes(place) == hashes(tmp_path / "other")


def test_bytes_that_move_from_one_file_to_the_next_are_seen(tmp_path: Path) -> None:
    place = make_task(tmp_path / "task")
    found = set()
    for first, second in (("ab", "c"), ("a", "bc")):
        write("environment/1", first)(place)
        write("environment/2", second)(place)
        found.add(hashes(place)[0])
    assert len(found) == 2


@pytest.mark.parametrize(
    ("line", "level"),
    [('difficulty = "hard"', "hard"), ('difficulty_level = "medium"\ndifficulty = "x"', "medium"), ("", None),
     ("difficulty = 3", "3"), ('difficulty = ""', None)],
)  # fmt: skip
def test_the_level_is_what_the_task_calls_it(tmp_path: Path, line: str, level: str | None) -> None:
    place = make_task(tmp_path / "task")
    in_toml('difficulty = "hard"', line)(place)
    assert difficulty_level(load_task(place)) == level

"""Generated tasks: disjoint splits, whole or absent, readable as Harbor tasks, no answer in the agent's reach."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import UserError
from pipeline.tasks.generate import ORDINALS, WORDS, draw_tasks, generate_tasks, split_of
from pipeline.tasks.harbor import load_tasks


def contents(path: Path) -> dict[str, str]:
    return {str(file.relative_to(path)): file.read_text() for file in path.rglob("*") if file.is_file()}


def test_word_list_is_clean() -> None:
    assert len(set(WORDS)) == len(WORDS)
    assert all(word.isalpha() and word.islower() for word in WORDS)


@given(st.permutations(WORDS[:4]))
def test_split_ignores_order(words: list[str]) -> None:
    assert split_of(tuple(words)) == split_of(WORDS[:4])


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_splits_share_no_set_of_words_whatever_the_seeds(first: int, second: int) -> None:
    train = {frozenset(task.words) for task in draw_tasks("train", 40, first)}
    test = {frozenset(task.words) for task in draw_tasks("test", 40, second)}
    assert len(train) == len(test) == 40
    assert not train & test


def test_tasks_are_the_seeds_and_every_ordinal_comes(tmp_path: Path) -> None:
    first = contents(generate_tasks(tmp_path / "a", "train", 30, 3))
    assert first == contents(generate_tasks(tmp_path / "b", "train", 30, 3))
    assert first != contents(generate_tasks(tmp_path / "a", "train", 30, 4))
    text = "\n".join(first.values())
    assert all(f"Write the {ordinal} word" in text for ordinal in ORDINALS)


def test_generating_again_leaves_the_directory_alone(tmp_path: Path) -> None:
    path = generate_tasks(tmp_path, "test", 2, 0)
    (path / "test-0000" / "instruction.md").write_text("edited")
    assert generate_tasks(tmp_path, "test", 2, 0) == path
    assert (path / "test-0000" / "instruction.md").read_text() == "edited"


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.tasks.generate._DOCKERFILE", None)
    with pytest.raises(TypeError):
        generate_tasks(tmp_path, "train", 2, 0)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("split", "size", "told"), [("dev", 3, "dev"), ("train", 0, "train_size=0")])
def test_bad_requests_are_the_users_errors(tmp_path: Path, split: str, size: int, told: str) -> None:
    with pytest.raises(UserError, match=told):
        generate_tasks(tmp_path, split, size, 0)


def test_the_answer_is_only_where_the_agent_cannot_look(tmp_path: Path) -> None:
    path = generate_tasks(tmp_path, "train", 12, 1)
    for loaded, drawn in zip(load_tasks(path), draw_tasks("train", 12, 1), strict=True):
        files = contents(loaded.ref.path)
        assert loaded.instruction == drawn.instruction
        assert drawn.answer in files.pop("tests/test.sh") and drawn.answer in files.pop("solution/solve.sh")
        del files["instruction.md"]  # names all four words
        assert not any(drawn.answer in text for text in files.values())


@pytest.mark.parametrize(
    ("written", "reward"),
    [("{answer}", "1"), ("{answer}\n", "1"), (None, "0"), ("", "0"), ("{answer} x", "0"), ("x\n{answer}", "0")],
)
def test_the_verifier_scores_the_file(tmp_path: Path, written: str | None, reward: str) -> None:
    task = draw_tasks("test", 1, 0)[0]
    script = generate_tasks(tmp_path / "tasks", "test", 1, 0) / "test-0000" / "tests" / "test.sh"
    workspace, logs = tmp_path / "workspace", tmp_path / "logs"
    workspace.mkdir()
    if written is not None:
        (workspace / "answer.txt").write_text(written.format(answer=task.answer))
    text = script.read_text().replace("/workspace", str(workspace)).replace("/logs", str(logs))
    subprocess.run(["/bin/sh", "-c", text], check=True)
    assert (logs / "verifier" / "reward.txt").read_text().strip() == reward

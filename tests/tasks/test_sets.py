"""Each kind of task set gives the tasks that the settings ask for, and says what is wrong when it cannot."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from smoldata_skeleton import make_task

from pipeline.config import SandboxConfig, TasksConfig, UserError
from pipeline.records import Verdict
from pipeline.sandbox.base import make_sandbox
from pipeline.stages.verification import verify
from pipeline.tasks.fingerprint import difficulty_level
from pipeline.tasks.harbor import HarborTask, prepare_workspace
from pipeline.tasks.sets import describe, load_set

KEYS = ["OPENAI_API_KEY"]


def settings(root: Path, **changed: Any) -> TasksConfig:
    given = {"kind": "smoldata", "train": str(root / "train"), "test": str(root / "test"), "host_env": KEYS}
    return TasksConfig(**{**given, "train_size": 0, "test_size": 0, **changed})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number, level in enumerate(("hard", "medium", "hard", "easy"), 1):
        make_task(tmp_path / "train", number=number, level=level)
    make_task(tmp_path / "test", "0009/9.ipynb")
    return tmp_path


def numbers(tasks: Sequence[HarborTask]) -> list[str]:
    return [task.ref.task_id.removeprefix("0001_2_qa_") for task in tasks]


def test_a_directory_of_smoldata_is_read_with_its_levels(root: Path) -> None:
    train = load_set(settings(root), "train", root)
    assert numbers(train) == ["1", "2", "3", "4"]
    assert describe(train) == "4 (1 easy, 2 hard, 1 medium)"
    assert [task.ref.task_id for task in load_set(settings(root), "test", root)] == ["0009_9_qa_1"]


def test_a_set_of_no_levels_is_described_by_its_number(root: Path) -> None:
    assert describe([]) == "0"
    assert describe(load_set(TasksConfig(train_size=3), "train", root / "made")) == "3"


@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        ({"levels": ["hard"]}, ["1", "3"]),
        ({"levels": ["easy", "medium"]}, ["2", "4"]),
        ({"levels": ["hard"], "train_size": 1}, ["1"]),
        ({"train_size": 3}, ["1", "2", "3"]),
        ({"train_size": 9}, ["1", "2", "3", "4"]),
    ],
)
def test_levels_and_sizes_choose(root: Path, changed: dict[str, Any], taken: list[str]) -> None:
    assert numbers(load_set(settings(root, **changed), "train", root)) == taken


NAME = "0001_2_qa_{}"


@pytest.mark.parametrize(
    "text",
    [
        f"{NAME.format(3)}\n{NAME.format(1)}\n",
        json.dumps([NAME.format(3), NAME.format(1)]),
        json.dumps([{"name": NAME.format(3), "notebook": "x"}, {"name": NAME.format(1)}]),
    ],
)
def test_a_list_takes_its_tasks_in_its_order(root: Path, text: str) -> None:
    names = root / "names"
    names.write_text(text)
    (root / "train" / "tasks" / NAME.format(2) / "task.toml").write_text("a task that is not named is not read")
    assert numbers(load_set(settings(root, train_names=str(names)), "train", root)) == ["3", "1"]


def test_a_list_may_say_how_hard_and_pin_the_instruction(root: Path) -> None:
    instruction = root / "train" / "tasks" / NAME.format(1) / "instruction.md"
    row = {"name": NAME.format(1), "difficulty": "hardest"}
    row["instruction_sha256"] = hashlib.sha256(instruction.read_bytes()).hexdigest()
    names = root / "names"
    names.write_text(json.dumps([row]))
    chosen = settings(root, train_names=str(names))
    assert [difficulty_level(task) for task in load_set(chosen, "train", root)] == ["hardest"]
    instruction.write_text("Another question.\n")
    with pytest.raises(UserError, match=r"0001_2_qa_1: instruction\.md is another than the list's"):
        load_set(chosen, "train", root)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0001_2_qa_1 missing_1 missing_2", "2 of its 3 tasks are not in the set, the first: missing_1, missing_2"),
        ("0001_2_qa_1 0001_2_qa_1", "names 0001_2_qa_1 twice"),
        ("[1]", "no list of task names"),
        ('[{"id": 3}]', "no list of task names"),
        ("[", "no list of task names"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_list_is_refused(root: Path, text: str | None, said: str) -> None:
    names = root / "names"
    if text is not None:
        names.write_text(text)
    with pytest.raises(UserError, match=said) as error:
        load_set(settings(root, train_names=str(names)), "train", root)
    assert str(error.value).startswith(f"tasks.train_names={names}")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kind": "swe"}, "tasks.kind='swe' is unknown; one of: generated, harbor, smoldata, humaneval"),
        ({"levels": ["brutal"]}, "no train task is brutal; there are: easy, hard, medium"),
        ({"kind": "harbor", "train": "/no/such"}, "tasks.train='/no/such' is no directory"),
        ({"kind": "harbor", "train": None}, "tasks.train=None is no directory"),
        ({"train": None}, "tasks.train=None is no directory"),
        ({"train": "/no/such"}, "tasks.train=/no/such is neither a directory nor"),
        ({"train": "FineEnvs/SmolDataEnvs-harbor-train"}, "40 digits"),
        ({"host_env": []}, "asks for a variable of the host, OPENAI_API_KEY"),
        ({"kind": "humaneval", "source": "/no/such.gz"}, "tasks.source=/no/such.gz: no such file"),
    ],
)
def test_what_cannot_be_had_is_said(root: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        load_set(settings(root, **changed), "train", root)
    assert said in str(error.value)


def test_the_answer_of_a_smoldata_task_reaches_the_verifier_and_no_file_of_the_agent(root: Path) -> None:
    (task,) = load_set(settings(root), "test", root)
    assert task.metadata["gold_answer"] == "seventeen boxes"
    prepare_workspace(task, root / "workspace")
    files = [path for path in (root / "workspace").rglob("*") if path.is_file()]
    assert [path.name for path in files] == ["pull_bucket.py"]
    assert not any("seventeen" in path.read_text() for path in files)
    assert "seventeen" not in task.instruction
    assert task.verifier_env == {"EXPECTED_ANSWER": "seventeen boxes", "REWARD_MODE": "exact_short"}


@pytest.mark.parametrize(("answer", "reward"), [("seventeen boxes\n", 1.0), ("eighteen", 0.0), (None, 0.0)])
def test_a_smoldata_grader_scores_with_a_null_beside_its_reward(root: Path, answer: str | None, reward: float) -> None:
    (task,) = load_set(settings(root), "test", root)
    workspace = root / "workspace"
    prepare_workspace(task, workspace)
    if answer is not None:
        (workspace / "answer.txt").write_text(answer)
    sandbox = make_sandbox(SandboxConfig(kind="bubblewrap"))
    assert asyncio.run(verify(task, workspace, sandbox, root)) == Verdict(reward, reward, 0)

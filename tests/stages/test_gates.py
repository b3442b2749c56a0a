"""Tasks that their own check must refuse, in a real sandbox; a second check of the same contents runs nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.config import SandboxConfig
from pipeline.sandbox.base import Sandbox, SandboxError, SandboxProcess, SandboxSpec, make_sandbox
from pipeline.stages.gates import GateFailure, check_tasks, content_digest
from pipeline.tasks.harbor import HarborTask, load_task

GOOD = """\
if [ "$(cat answer.txt)" = "$(cat list.txt)" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
ALWAYS = "echo 1 > /logs/verifier/reward.txt"


class CountingSandbox:
    """A real sandbox that remembers its launches."""

    def __init__(self) -> None:
        self._real = make_sandbox(SandboxConfig(kind="bubblewrap"))
        self.specs: list[SandboxSpec] = []

    @property
    def launches(self) -> int:
        return len(self.specs)

    async def launch(self, spec: SandboxSpec) -> SandboxProcess:
        self.specs.append(spec)
        return await self._real.launch(spec)


class BrokenSandbox:
    async def launch(self, spec: SandboxSpec) -> SandboxProcess:
        raise SandboxError("out of namespaces")


@pytest.fixture
def counting() -> CountingSandbox:
    return CountingSandbox()


def make_task(
    root: Path, name: str, test: str = GOOD, solution: str | None = "cat list.txt > answer.txt"
) -> HarborTask:
    path = root / "tasks" / name
    files = {
        "tests/test.sh": f"#!/bin/sh\n{test}\n",
        "environment/list.txt": "42\n",
        "instruction.md": "Copy the list.",
        "task.toml": "[agent]\ntimeout_sec = 2.0\n",
    }
    if solution is not None:
        files["solution/solve.sh"] = f"#!/bin/sh\n{solution}\n"
    for relative, text in files.items():
        (path / relative).parent.mkdir(parents=True, exist_ok=True)
        (path / relative).write_text(text)
    return load_task(path)


def check(tasks: Sequence[HarborTask], sandbox: Sandbox, cache: Path, system: str = "") -> list[GateFailure]:
    return asyncio.run(check_tasks(tasks, sandbox, 2, cache, system))


@pytest.mark.parametrize("kind", ["bubblewrap", "process"])
def test_good_tasks_pass_with_and_without_isolation(tmp_path: Path, kind: str) -> None:
    tasks = [
        make_task(tmp_path, "a"),
        make_task(tmp_path, "b", solution="cp /workspace/list.txt /workspace/answer.txt"),
    ]
    assert check(tasks, make_sandbox(SandboxConfig(kind=kind)), tmp_path / "cache.json") == []


@pytest.mark.parametrize(
    ("test", "solution", "gate", "score", "said"),
    [
        (ALWAYS, "true", "nop", 1.0, "nop gave 1 instead of 0"),
        (GOOD, "echo 41 > answer.txt", "oracle", 0.0, "oracle gave 0 instead of 1"),
        (GOOD, "echo broken >&2; exit 4", "oracle", 0.0, "exit 4: broken"),
        (GOOD, "sleep 30", "oracle", None, "solve.sh went over 2 s"),
        ("echo 0.5 > /logs/verifier/reward.txt", None, "nop", 0.5, "nop gave 0.5"),
        ("exit 1", None, "nop", None, "no score instead of 0 (verifier: no reward file"),
    ],
)
def test_a_task_that_contradicts_itself_is_named(
    tmp_path: Path,
    counting: CountingSandbox,
    test: str,
    solution: str | None,
    gate: str,
    score: float | None,
    said: str,
) -> None:
    tasks = [make_task(tmp_path, "good"), make_task(tmp_path, "bad", test, solution)]
    (failure,) = check(tasks, counting, tmp_path / "cache.json")
    assert (failure.task_id, failure.gate, failure.score) == ("bad", gate, score)
    assert said in str(failure)


def test_a_task_without_a_solution_is_checked_by_nop_alone(tmp_path: Path, counting: CountingSandbox) -> None:
    assert check([make_task(tmp_path, "a", solution=None)], counting, tmp_path / "cache.json") == []
    assert counting.launches == 1


def test_the_second_check_runs_only_what_changed_or_failed(tmp_path: Path, counting: CountingSandbox) -> None:
    tasks = [make_task(tmp_path, "a"), make_task(tmp_path, "b"), make_task(tmp_path, "bad", ALWAYS)]
    cache = tmp_path / "deep" / "cache.json"
    assert [failure.task_id for failure in check(tasks, counting, cache)] == ["bad"]
    assert counting.launches == 9
    assert len(check(tasks, counting, cache)) == 1
    assert counting.launches == 12
    (tasks[0].tests / "test.sh").write_text(f"#!/bin/sh\n# changed\n{GOOD}\n")
    check(tasks[:2], counting, cache)
    assert counting.launches == 15


def test_a_check_in_another_image_is_another_check(tmp_path: Path, counting: CountingSandbox) -> None:
    tasks, cache = [make_task(tmp_path, "a")], tmp_path / "cache.json"
    counts = []
    for system in ("", "docker://a", "docker://b", "docker://a", ""):
        check(tasks, counting, cache, system)
        counts.append(len(counting.specs))
    assert 0 < counts[0] < counts[1] < counts[2] == counts[3] == counts[4]


def test_a_damaged_cache_costs_only_time(tmp_path: Path, counting: CountingSandbox) -> None:
    cache = tmp_path / "cache.json"
    cache.write_text('["torn')
    assert check([make_task(tmp_path, "a")], counting, cache) == []
    assert check([make_task(tmp_path, "a")], counting, cache) == []
    assert counting.launches == 3


def test_a_broken_sandbox_is_a_failure_that_is_not_remembered(tmp_path: Path, counting: CountingSandbox) -> None:
    task = make_task(tmp_path, "a")
    failures = check([task], BrokenSandbox(), tmp_path / "cache.json")
    assert [(failure.gate, failure.score) for failure in failures] == [("nop", None), ("oracle", None)]
    assert all("out of namespaces" in str(failure) for failure in failures)
    assert check([task], counting, tmp_path / "cache.json") == []
    assert counting.launches == 3


def test_neither_gate_shows_the_solution_to_the_verifier_or_the_tests_to_the_solution(
    tmp_path: Path, counting: CountingSandbox
) -> None:
    check([make_task(tmp_path, "a")], counting, tmp_path / "cache.json")
    mounted = [{inside for _, inside, _ in spec.mounts} for spec in counting.specs]
    assert sorted(mounted, key=len) == [{"/solution"}, {"/tests", "/logs"}, {"/tests", "/logs"}]
    assert all(spec.listen_port is None for spec in counting.specs)


def test_progress_counts_every_task(tmp_path: Path, counting: CountingSandbox) -> None:
    tasks = [make_task(tmp_path, name) for name in "abc"]
    told: list[tuple[int, int]] = []
    asyncio.run(
        check_tasks(
            tasks, counting, 2, tmp_path / "cache.json", progress=lambda done, total: told.append((done, total))
        )
    )
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_the_digest_sees_contents_names_and_modes(tmp_path: Path) -> None:
    task = make_task(tmp_path, "a")
    first = content_digest(task.ref.path)
    assert first == content_digest(task.ref.path)
    (task.tests / "test.sh").chmod(0o755)
    second = content_digest(task.ref.path)
    (task.tests / "test.sh").rename(task.tests / "test2.sh")
    third = content_digest(task.ref.path)
    (task.tests / "test2.sh").write_text("other")
    assert len({first, second, third, content_digest(task.ref.path)}) == 4

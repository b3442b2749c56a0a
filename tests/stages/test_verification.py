"""Verification in a real sandbox: what scores, what is ungraded, what the agent and the tests cannot reach."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest
from real_apptainer import KINDS

from pipeline.config import SandboxConfig
from pipeline.records import Verdict
from pipeline.sandbox.base import Sandbox, SandboxError, SandboxProcess, SandboxSpec, make_sandbox
from pipeline.sandbox.layer import WorkspaceTooLarge, link_stays, remove_tree, snapshot
from pipeline.stages.verification import run_to_end, verify
from pipeline.tasks.harbor import HarborTask, load_task

Verify = Callable[..., Verdict]
PICK = 'if [ "$(cat /workspace/answer.txt)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt'


@pytest.fixture(params=KINDS)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return make_sandbox(SandboxConfig(kind=request.param, memory_mb=256, processes=64))


@pytest.fixture
def isolated() -> Sandbox:
    return make_sandbox(SandboxConfig(kind="bubblewrap", memory_mb=256, processes=64, file_mb=512, tmp_mb=512))


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "workspace").mkdir()
    return tmp_path / "workspace"


@pytest.fixture
def score(tmp_path: Path, workspace: Path) -> Verify:
    """Runs a test script on the workspace; afterwards nothing may be left in the scratch directory."""

    def run(sandbox: Sandbox, script: str, toml: str = "", shebang: str = "#!/bin/sh") -> Verdict:
        task = make_task(tmp_path / "task", f"{shebang}\n{script}\n", toml)
        scratch = tmp_path / "scratch"
        scratch.mkdir(exist_ok=True)
        verdict = asyncio.run(verify(task, workspace, sandbox, scratch))
        assert list(scratch.iterdir()) == []
        return verdict

    return run


def make_task(path: Path, script: str, toml: str = "") -> HarborTask:
    (path / "tests").mkdir(parents=True)
    (path / "tests" / "test.sh").write_text(script)
    (path / "tests" / "expected.txt").write_text("42\n")
    (path / "instruction.md").write_text("Answer.")
    (path / "task.toml").write_text(toml)
    return load_task(path)


@pytest.mark.parametrize(("answer", "correctness"), [("42\n", 1.0), ("41\n", 0.0), (None, 0.0)])
def test_the_tests_score_what_is_in_the_workspace(
    score: Verify, sandbox: Sandbox, workspace: Path, answer: str | None, correctness: float
) -> None:
    if answer is not None:
        (workspace / "answer.txt").write_text(answer)
    assert score(sandbox, PICK) == Verdict(correctness, correctness, 0)


@pytest.mark.parametrize(
    ("files", "correctness"),
    [
        ({"reward.json": '{"reward": 0.5}'}, 0.5),
        ({"reward.json": '{"correctness": 1, "speed": 0.2}'}, 1.0),
        ({"reward.json": '{"score": 0.25}', "reward.txt": "1"}, 0.25),
        ({"reward.json": "true"}, 1.0),
        ({"reward.txt": " 0.75\\n"}, 0.75),
        ({"reward.json": '{"a": 1, "b": 0}'}, None),
        ({"reward.json": '{"reward": null}'}, None),
        ({"reward.txt": "yes"}, None),
        ({"reward.txt": "NaN"}, None),
        ({"reward.txt": ""}, None),
    ],
)
def test_reward_files(score: Verify, isolated: Sandbox, files: dict[str, str], correctness: float | None) -> None:
    script = "\n".join(f"printf '{text}' > /logs/verifier/{name}" for name, text in files.items())
    verdict = score(isolated, script)
    assert verdict.correctness == verdict.reward == correctness
    assert (correctness is None) == ("holds no number" in verdict.reason)


def test_no_reward_file_is_ungraded_and_the_reason_shows_the_output(score: Verify, sandbox: Sandbox) -> None:
    verdict = score(sandbox, "echo cannot find the grader; exit 3")
    assert verdict.reward is None and verdict.correctness is None
    assert "no reward file was written (exit 3): cannot find the grader" in verdict.reason


def test_a_verifier_out_of_time_is_ungraded(score: Verify, sandbox: Sandbox) -> None:
    verdict = score(sandbox, "echo 1 > /logs/verifier/reward.txt; sleep 60", "[verifier]\ntimeout_sec = 0.5")
    assert verdict.correctness is None
    assert "not done after 0.5 s" in verdict.reason


@pytest.mark.slow
def test_a_workspace_that_drives_the_tests_over_a_limit_scores_zero(
    score: Verify, isolated: Sandbox, workspace: Path
) -> None:
    (workspace / "hog.sh").write_text("x=$(head -c 400000000 /dev/zero | tr '\\0' x); sleep 30")
    verdict = score(isolated, "sh /workspace/hog.sh; echo 1 > /logs/verifier/reward.txt")
    assert verdict.correctness == 0.0
    assert "limit of memory" in verdict.reason


class BrokenSandbox:
    async def launch(self, spec: SandboxSpec) -> SandboxProcess:
        raise SandboxError("no user namespaces left")


def test_a_sandbox_that_does_not_start_is_ungraded(score: Verify) -> None:
    verdict = score(BrokenSandbox(), PICK)
    assert verdict == Verdict(None, None, 0, "verifier: no user namespaces left")


def test_a_missing_workspace_is_ungraded(score: Verify, isolated: Sandbox, workspace: Path) -> None:
    workspace.rmdir()
    assert score(isolated, PICK).correctness is None


def test_the_workspace_itself_is_left_alone(score: Verify, sandbox: Sandbox, workspace: Path) -> None:
    (workspace / "answer.txt").write_text("42\n")
    score(sandbox, f"{PICK}\necho spoilt > /workspace/answer.txt\ntouch /workspace/new")
    assert sorted(os.listdir(workspace)) == ["answer.txt"]
    assert (workspace / "answer.txt").read_text() == "42\n"


def test_the_tests_of_the_task_cannot_be_changed(score: Verify, isolated: Sandbox, tmp_path: Path) -> None:
    verdict = score(isolated, "echo x > /tests/expected.txt || echo 1 > /logs/verifier/reward.txt")
    assert verdict.correctness == 1.0
    assert (tmp_path / "task" / "tests" / "expected.txt").read_text() == "42\n"


def test_there_is_no_network(score: Verify, isolated: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        script = f'python3 -c "{code}" && echo 0 > /logs/verifier/reward.txt || echo 1 > /logs/verifier/reward.txt'
        assert score(isolated, script).correctness == 1.0


def test_the_solution_and_the_task_file_are_not_inside(score: Verify, isolated: Sandbox) -> None:
    script = "test -e /solution -o -e /task.toml; echo $? > /logs/verifier/reward.txt"
    assert score(isolated, script).correctness == 1.0


def test_the_environment_of_the_task_file_reaches_the_tests(score: Verify, sandbox: Sandbox) -> None:
    assert (
        score(sandbox, 'echo "$MARK" > /logs/verifier/reward.txt', '[verifier]\nenv = { MARK = "0.3" }').reward == 0.3
    )


def test_bash_runs_what_asks_for_bash(score: Verify, sandbox: Sandbox) -> None:
    script = "a=(0 1); echo ${a[1]} > /logs/verifier/reward.txt"
    assert score(sandbox, script, shebang="#!/usr/bin/env bash").correctness == 1.0


@pytest.mark.parametrize("target", ["/tests/expected.txt", "../tests/expected.txt", "folder/../../tests/expected.txt"])
def test_a_link_to_the_tests_is_no_answer(score: Verify, isolated: Sandbox, workspace: Path, target: str) -> None:
    (workspace / "folder").mkdir()
    (workspace / "answer.txt").symlink_to(target)
    verdict = score(isolated, f"test -e /tests/expected.txt || exit 1\n{PICK}")
    assert verdict.correctness == 0.0


def test_a_reward_that_is_a_link_is_not_followed(score: Verify, isolated: Sandbox, workspace: Path) -> None:
    (workspace / "one").write_text("1")
    verdict = score(isolated, "ln -s ../../workspace/one /logs/verifier/reward.txt")
    assert verdict.correctness is None and "regular file" in verdict.reason


def test_everything_is_dead_when_a_verification_is_cancelled(
    tmp_path: Path, workspace: Path, isolated: Sandbox
) -> None:
    task = make_task(tmp_path / "task", "#!/bin/sh\nexec sleep 54321.5\n")

    async def cancel_soon() -> None:
        running = asyncio.create_task(verify(task, workspace, isolated, tmp_path))
        for _ in range(200):
            await asyncio.sleep(0.05)
            if sleeping():
                break
        assert sleeping()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not sleeping()

    asyncio.run(cancel_soon())
    assert not list(tmp_path.glob("verify-*"))


class StuckProcess:
    """Ends only when it is killed, and then not at once."""

    def __init__(self) -> None:
        self.killed = asyncio.Event()
        self.ended = False

    def kill(self) -> None:
        self.killed.set()

    async def wait(self) -> None:
        await self.killed.wait()
        await asyncio.sleep(0.05)
        self.ended = True


def test_a_cancelled_run_is_waited_for_after_the_kill() -> None:
    async def cancel() -> None:
        process = StuckProcess()

        class OneSandbox:
            async def launch(self, spec: SandboxSpec) -> StuckProcess:
                return process

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run_to_end(OneSandbox(), SandboxSpec(("true",))), 0.05)
        assert process.ended

    asyncio.run(cancel())


def sleeping() -> bool:
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if process.read_bytes() == b"sleep\x0054321.5\x00":
                return True
        except OSError:
            continue
    return False


def test_a_snapshot_keeps_files_modes_and_inner_links_only(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a" / "b").mkdir(parents=True)
    (source / "a" / "run.sh").write_text("x")
    (source / "a" / "run.sh").chmod(0o755)
    (source / "a" / "b" / "up").symlink_to("../run.sh")
    (source / "secret").symlink_to("/etc/passwd")
    (source / "a" / "out").symlink_to("../../elsewhere")
    (source / "absolute").symlink_to(source / "a" / "run.sh")
    (source / "closed").mkdir()
    (source / "closed" / "file").write_text("y")
    (source / "closed" / "file").chmod(0)
    (source / "closed").chmod(0)
    os.mkfifo(source / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(source / "sock"))
    snapshot(source, tmp_path / "copy")
    copied = {str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*")}
    assert copied == {"a", "a/b", "a/run.sh", "a/b/up", "closed", "closed/file"}
    assert (tmp_path / "copy" / "a" / "b" / "up").read_text() == "x"
    assert os.access(tmp_path / "copy" / "a" / "run.sh", os.X_OK)
    assert (tmp_path / "copy" / "closed" / "file").read_text() == "y"


def test_a_snapshot_is_bounded_in_bytes_and_files(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "large").write_bytes(os.urandom(1 << 16))
    with pytest.raises(WorkspaceTooLarge):
        snapshot(source, tmp_path / "one", max_bytes=1 << 15)
    (source / "large").unlink()
    for number in range(11):
        (source / str(number)).touch()
    snapshot(source, tmp_path / "two", max_files=11)
    with pytest.raises(WorkspaceTooLarge):
        snapshot(source, tmp_path / "three", max_files=10)


def test_holes_and_hard_links_cost_nothing_and_stay(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with open(source / "sparse", "wb") as file:
        file.seek(1 << 30)
        file.write(b"end")
        file.truncate(1 << 40)
    (source / "one").write_bytes(os.urandom(1 << 16))
    for number in range(100):
        os.link(source / "one", source / f"again{number}")
    snapshot(source, tmp_path / "copy", max_bytes=1 << 18)
    copied = (tmp_path / "copy" / "sparse").stat()
    assert copied.st_size == 1 << 40 and copied.st_blocks * 512 < 1 << 17
    with open(tmp_path / "copy" / "sparse", "rb") as file:
        file.seek(1 << 30)
        assert file.read(4) == b"end\0"
    assert (tmp_path / "copy" / "one").stat().st_nlink == 101
    assert (tmp_path / "copy" / "again7").read_bytes() == (source / "one").read_bytes()


def test_what_lies_deeper_than_a_path_is_long_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "answer").write_text("42")
    deep = "import os\nfor _ in range(30):\n os.mkdir('deep' * 50)\n os.chdir('deep' * 50)"
    subprocess.run([sys.executable, "-c", deep], cwd=tmp_path / "source", check=True)
    snapshot(tmp_path / "source", tmp_path / "copy")
    assert (tmp_path / "copy" / "answer").read_text() == "42" and (
        tmp_path / "copy" / ("deep" * 50) / ("deep" * 50)
    ).is_dir()
    for name in ("source", "copy"):
        remove_tree(tmp_path / name)
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("link", "target", "stays"),
    [
        ("/workspace/a", "b", True),
        ("/workspace/a/b/c", "../../d", True),
        ("/workspace/a", "/workspace/b", True),
        ("/workspace/venv/bin/python", "/usr/bin/python3", True),
        ("/home/agent/x", "../../usr/bin/true", True),
        ("/workspace/a", "/tests/expected", False),
        ("/workspace/a", "../tests/expected", False),
        ("/workspace/a", "/", False),
        ("/workspace/a", "..", False),
        ("/workspace/a", "/usr/../tests", False),
        ("/workspace/a", "b/../../tests", False),
        ("/workspace/a", "/proc/self/root", False),
        ("/workspace/a", "/etc/shadow", False),
        ("/workspace/a", "//tests/expected", False),
    ],
)
def test_which_links_are_copied(link: str, target: str, stays: bool) -> None:
    assert link_stays(PurePosixPath(link), target) == stays


def test_a_workspace_that_is_too_large_scores_zero(
    score: Verify, isolated: Sandbox, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "__defaults__", (1 << 15, 10))
    (workspace / "large").write_bytes(os.urandom(1 << 16))
    verdict = score(isolated, "echo 1 > /logs/verifier/reward.txt")
    assert (verdict.reward, verdict.correctness) == (0.0, 0.0)
    assert "the workspace holds more than" in verdict.reason


def test_a_tree_with_closed_directories_can_be_removed(tmp_path: Path) -> None:
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    (tmp_path / "tree" / "deep" / "file").touch()
    (tmp_path / "tree" / "deep").chmod(0)
    (tmp_path / "tree").chmod(0)
    remove_tree(tmp_path / "tree")
    assert not (tmp_path / "tree").exists()

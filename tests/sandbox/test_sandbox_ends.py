"""Whatever ends a sandbox (its command, a limit, a kill, the launcher's death), nothing that it started lives on."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from living import alive
from real_apptainer import ISOLATED, KINDS, needs_apptainer

from pipeline.config import SandboxConfig
from pipeline.sandbox import SandboxError, SandboxExit, SandboxProcess, SandboxSpec, make_sandbox
from pipeline.sandbox.disk import fits

ROOT = Path(__file__).parents[2]


@pytest.fixture
def mark() -> str:
    """A name that no other process has in its arguments."""
    return f"daemon-{uuid.uuid4().hex}"


TWICE_FORKED = """
import os, sys
if not os.fork():
    os.setsid()
    if not os.fork():
        os.closerange(0, 100)
        os.execvp("sleep", [sys.argv[1], "300"])
    os._exit(0)
"""
TMUX = ["tmux"] if shutil.which("tmux") else []


def daemon(mark: str) -> str:
    """A shell line that leaves detached processes behind: own sessions, no parents, no signal heeded; and tmux's."""
    lines = [f"(trap '' TERM HUP INT; setsid bash -c 'exec -a {mark} sleep 300' >/dev/null 2>&1 &)"]
    lines += [f"python3 -c '{TWICE_FORKED}' {mark}"]
    lines += [f"""tmux -S $TMPDIR/server new-session -d "exec bash -c 'exec -a {mark} sleep 300'" """ for _ in TMUX]
    return ";".join(lines) + "; sleep 0.3;"


def daemons_run(mark: str) -> bool:
    return len(alive(mark)) == 2 + len(TMUX)


async def daemon_runs(mark: str) -> None:
    await until(lambda: daemons_run(mark), 60)


async def launched(
    kind: str, script: str, during=None, timeout_s: float = 60.0, workspace: Path | None = None, **limits
) -> SandboxExit:
    config = SandboxConfig(kind=kind, **limits)
    spec = SandboxSpec(("bash", "-c", script), workspace=workspace, timeout_s=timeout_s)
    process = await make_sandbox(config).launch(spec)
    if during is not None:
        await during(process)
    return await process.wait()


@pytest.mark.parametrize("kind", KINDS)
def test_a_daemon_dies_with_its_command(kind, mark, tmp_path):
    async def during(process: SandboxProcess) -> None:
        await daemon_runs(mark)
        (tmp_path / "over").touch()

    script = daemon(mark) + "until [ -e over ]; do sleep 0.05; done; exit 3"
    exit = asyncio.run(launched(kind, script, during, workspace=tmp_path, timeout_s=60.0))
    assert alive(mark) == []
    assert exit.returncode == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_daemon_dies_at_the_time_limit(kind, mark):
    async def during(process: SandboxProcess) -> None:
        await daemon_runs(mark)

    exit = asyncio.run(
        launched(kind, daemon(mark) + "trap '' TERM; sleep 100 & wait; sleep 100", during, timeout_s=4.0)
    )
    assert alive(mark) == []
    assert (exit.returncode, exit.timed_out, exit.killed) == (None, True, None)
    assert exit.wall_s < 60


@pytest.mark.parametrize("kind", KINDS)
def test_kill_ends_everything(kind, mark):
    async def during(process: SandboxProcess) -> None:
        await daemon_runs(mark)
        process.kill()

    exit = asyncio.run(launched(kind, daemon(mark) + "sleep 100", during))
    assert alive(mark) == []
    assert (exit.returncode, exit.timed_out, exit.killed) == (None, False, "asked")


LAUNCHER = """
import asyncio, sys
from pipeline.config import SandboxConfig
from pipeline.sandbox import SandboxSpec, make_sandbox
async def main():
    process = await make_sandbox(SandboxConfig(kind=sys.argv[1])).launch(
        SandboxSpec(("bash", "-c", sys.argv[2]), listen_port=8000, timeout_s=100))
    process.go()
    await process.wait()
asyncio.run(main())
"""


@pytest.mark.parametrize("kind", KINDS)
def test_everything_dies_with_the_launcher(kind, mark, tmp_path):
    argv = [sys.executable, "-c", LAUNCHER, kind, daemon(mark) + f"exec -a {mark}-2 sleep 100"]
    launcher = subprocess.Popen(argv, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)})
    try:
        asyncio.run(until(lambda: daemons_run(mark) and bool(alive(f"{mark}-2")), 60))
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait(10)
    asyncio.run(until(lambda: not alive(mark) and not alive(f"{mark}-2")))
    asyncio.run(until(lambda: not os.listdir(tmp_path)))


@pytest.mark.parametrize("kind", KINDS)
def test_memory_limit(kind):
    hog = "exec python3 -c 'import time\nheld = []\nwhile True: held.append(bytearray(8 << 20)); time.sleep(0.01)'"
    exit = asyncio.run(launched(kind, hog, memory_mb=200))
    assert exit.killed == "memory" and exit.returncode is None
    assert 200 < exit.peak_memory_mb < 1000


@pytest.mark.parametrize("kind", KINDS)
def test_memory_limit_is_that_of_all_processes_together(kind):
    """Eight times 50 MB, none of which is over the limit by itself."""
    hogs = (
        "for i in 1 2 3 4 5 6 7 8; do python3 -c 'held = bytearray(50 << 20); import time; time.sleep(60)' & done; wait"
    )
    exit = asyncio.run(launched(kind, hogs, timeout_s=60.0, memory_mb=300))
    assert (exit.returncode, exit.killed) == (None, "memory")
    assert exit.peak_memory_mb > 300


@pytest.mark.parametrize("kind", KINDS)
def test_shared_pages_count_once(kind):
    """150 MB shared by five processes is 150 MB, far from the 750 that the sum of resident sizes says."""
    fork = "os.fork() or (time.sleep(1.5), os._exit(0))"
    script = f"import os, time\nheld = bytearray(150 << 20)\nfor _ in range(4): {fork}\ntime.sleep(1.5)"
    exit = asyncio.run(launched(kind, f"exec python3 -c '{script}'", memory_mb=400))
    assert (exit.returncode, exit.killed) == (0, None)
    assert 140 < exit.peak_memory_mb < 350


@pytest.mark.parametrize("kind", KINDS)
def test_fork_bomb_is_bounded(kind, mark):
    """A user's processes stop at the limit; where root's do not, the watch ends the sandbox."""
    bomb = f"for i in $(seq 400); do (exec -a {mark} sleep 30) & done 2>/dev/null; wait"
    exit = asyncio.run(launched(kind, bomb, processes=64))
    assert alive(mark) == []
    assert exit.killed == "processes" or exit.peak_processes <= 64


@pytest.mark.parametrize("kind", KINDS)
def test_files_have_a_size_limit(kind, tmp_path):
    async def inner() -> SandboxExit:
        sandbox = make_sandbox(SandboxConfig(kind=kind, file_mb=1))
        argv = ("dd", "if=/dev/zero", "of=/workspace/big", "bs=1M", "count=4")
        if kind == "process":
            argv = ("bash", "-c", "dd if=/dev/zero of=/workspace/big bs=1M count=4")
        return await (await sandbox.launch(SandboxSpec(argv, workspace=tmp_path))).wait()

    assert asyncio.run(inner()).returncode != 0
    assert (tmp_path / "big").stat().st_size == 1 << 20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("port", [None, 8000])
def test_stdin_is_the_given_text_and_ends(kind, port, tmp_path):
    text = "first\nsecond ü " + "x" * 300_000

    async def inner(stdin: str | None) -> str:
        log = tmp_path / str(stdin is None)
        spec = SandboxSpec(("cat",), stdin=stdin, listen_port=port, stdout=log, timeout_s=60)
        process = await make_sandbox(SandboxConfig(kind=kind)).launch(spec)
        process.go()
        assert (await process.wait()).returncode == 0
        return log.read_text()

    assert asyncio.run(inner(text)) == text
    assert asyncio.run(inner(None)) == ""


WRITE = """
import os, sys, time
step, size = int(sys.argv[1]), int(sys.argv[2]) << 20
for i in range(step):
    with open(f"{sys.argv[3]}/{i}", "wb") as file:
        file.write(bytes(size))
    time.sleep(float(sys.argv[4]))
"""


PIPE = "yes | head -n 1; echo ${PIPESTATUS[0]}"


def written(kind: str, workspace: Path, count: int, size_mb: int, pause_s: float, **limits) -> SandboxExit:
    """How a command that writes so many files of that size ends."""

    async def inner() -> SandboxExit:
        argv = ("python3", "-c", WRITE, str(count), str(size_mb), "/workspace", str(pause_s))
        sandbox = make_sandbox(SandboxConfig(kind=kind, **limits))
        return await (await sandbox.launch(SandboxSpec(argv, workspace=workspace, timeout_s=60))).wait()

    return asyncio.run(inner())


@pytest.mark.parametrize("kind", ISOLATED)
def test_ten_thousand_small_files_are_fine(kind, tmp_path):
    exit = written(kind, tmp_path, 10_000, 0, 0)
    assert (exit.returncode, exit.killed) == (0, None)
    assert len(os.listdir(tmp_path)) == 10_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_workspace_has_a_size_limit(kind, tmp_path):
    """10 GB in files that are each within the limit of a file."""
    exit = written(kind, tmp_path, 200, 50, 0.1, workspace_mb=200)
    assert (exit.returncode, exit.killed) == (None, "disk")
    assert len(os.listdir(tmp_path)) < 60


@pytest.mark.parametrize("kind", ISOLATED)
def test_a_workspace_has_a_limit_of_files(kind, tmp_path):
    exit = written(kind, tmp_path, 1_000_000, 0, 0.0001, workspace_files=5000)
    assert exit.killed == "disk"
    assert 5000 < len(os.listdir(tmp_path)) < 200_000


@pytest.mark.parametrize("place", ["/tmp", "$HOME", "/dev/shm", "/workspace"])
def test_memory_file_systems_have_limits_too(place, tmp_path):
    """Their bytes have one each; their files are the kernel's memory."""
    fill = f"cd {place}; for i in 1 2 3 4 5; do head -c 100M /dev/zero > $i; done 2>/dev/null; du -sm . | cut -f1"
    many = f"cd {place}; mkdir many; cd many; seq 20000 | xargs touch; sleep 30"

    async def inner(script: str) -> SandboxExit:
        sandbox = make_sandbox(SandboxConfig(tmp_mb=150, workspace_files=10_000))
        spec = SandboxSpec(("bash", "-c", script), stdout=tmp_path / "log", timeout_s=60)
        return await (await sandbox.launch(spec)).wait()

    assert asyncio.run(inner(fill)).returncode == 0
    assert int((tmp_path / "log").read_text()) <= 150
    assert asyncio.run(inner(many)).killed == "disk"


@needs_apptainer
@pytest.mark.parametrize("place", ["/dev", "/dev/shm"])
def test_apptainers_own_memory_has_a_limit(place):
    """Its size is the site's choice, so it is watched."""
    few = f"head -c 5M /dev/zero > {place}/x; sleep 0.5"
    many = f"for i in 1 2 3 4 5; do head -c 20M /dev/zero > {place}/$i; done; sleep 60"
    assert asyncio.run(launched("apptainer", few, tmp_mb=30)).returncode == 0
    assert asyncio.run(launched("apptainer", many, tmp_mb=30)).killed == "disk"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("port", [None, 8000])
def test_a_broken_pipe_ends_a_program(kind, port, tmp_path):
    """Python ignores that signal, and what it starts would too."""

    async def inner() -> None:
        spec = SandboxSpec(("bash", "-c", PIPE), listen_port=port, stdout=tmp_path / "log")
        process = await make_sandbox(SandboxConfig(kind=kind)).launch(spec)
        process.go()
        assert (await process.wait()).returncode == 0

    asyncio.run(inner())
    assert (tmp_path / "log").read_text().splitlines() == ["y", "141"]


@needs_apptainer
def test_nothing_inside_ends_process_1():
    script = "for signal in INT TERM USR1 USR2 KILL; do kill -$signal 1; done; sleep 0.3; exit 4"
    assert asyncio.run(launched("apptainer", script)).returncode == 4


def test_a_full_host_is_an_infrastructure_failure(tmp_path):
    with pytest.raises(SandboxError, match=r"only \d+ MB are left"):
        written("bubblewrap", tmp_path, 1000, 0, 0.1, disk_free_mb=1 << 40)


def test_a_tree_is_not_walked_without_need(tmp_path, monkeypatch):
    walks = []
    monkeypatch.setattr("pipeline.sandbox.disk.fits", lambda *arguments: walks.append(arguments) or True)
    assert written("bubblewrap", tmp_path, 20, 0, 0.05).returncode == 0
    assert walks == []


def test_links_count_once_and_lead_nowhere(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    for name in ("in/file", "out/file"):
        (tmp_path / name).write_bytes(bytes(1 << 20))
    for i in range(5):
        (tmp_path / "in" / "deep" / f"hard{i}").hardlink_to(tmp_path / "in" / "file")
        (tmp_path / "in" / f"soft{i}").symlink_to(tmp_path / "out")
    assert fits([tmp_path / "in"], (1 << 20) + (1 << 16), 8)
    assert not fits([tmp_path / "in"], 1 << 20, 8)
    assert not fits([tmp_path / "in"], 2 << 20, 6)


@pytest.mark.parametrize("kind", ISOLATED)
def test_a_killed_sandbox_is_an_infrastructure_failure(kind, mark):
    """kill -9 of the sandbox program from outside: not an exit code of the command, and nothing lives on."""

    async def during(process: SandboxProcess) -> None:
        await daemon_runs(mark)
        os.kill(process.pid, signal.SIGKILL)

    with pytest.raises(SandboxError, match="killed"):
        asyncio.run(launched(kind, daemon(mark) + "sleep 100", during))
    assert alive(mark) == []


@pytest.mark.parametrize("kind", ISOLATED)
def test_a_cancelled_wait_ends_the_sandbox(kind, mark):
    async def inner() -> SandboxExit:
        process = await make_sandbox(SandboxConfig(kind=kind)).launch(
            SandboxSpec(("bash", "-c", daemon(mark) + "sleep 100"))
        )
        waiting = asyncio.create_task(process.wait())
        await daemon_runs(mark)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return await process.wait()

    assert asyncio.run(inner()).killed == "asked"
    assert alive(mark) == []


@pytest.mark.parametrize("kind", ISOLATED)
def test_wait_without_go_starts_nothing(kind, tmp_path):
    async def inner() -> None:
        process = await make_sandbox(SandboxConfig(kind=kind)).launch(
            SandboxSpec(("touch", "ran"), workspace=tmp_path, listen_port=8000)
        )
        with pytest.raises(RuntimeError, match="before go"):
            await process.wait()
        assert (await process.wait()).killed == "asked"

    asyncio.run(inner())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ISOLATED)
def test_no_descriptor_is_left_open(kind, tmp_path):
    async def inner() -> tuple[int, int]:
        sandbox = make_sandbox(SandboxConfig(kind=kind))
        counts = []
        for _ in range(2):
            for port in (None, 8000):
                process = await sandbox.launch(SandboxSpec(("true",), listen_port=port, stdout=tmp_path / "log"))
                process.go()
                await process.wait()
            counts.append(len(os.listdir("/proc/self/fd")))
        return counts[0], counts[1]

    first, second = asyncio.run(inner())
    assert first == second


async def until(condition, timeout_s: float = 10.0) -> None:
    """Wait for ``condition``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        await asyncio.sleep(0.02)


BURN = "import time\nwhile time.process_time() < 0.4: pass"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(f"python3 -c '{BURN}' & python3 -c '{BURN}'; wait", id="waited for"),
        pytest.param(
            f"(setsid python3 -c '{BURN}\nopen(\"burnt\", \"w\"); time.sleep(60)' &); python3 -c '{BURN}';"
            "until [ -e burnt ]; do sleep 0.1; done; sleep 0.5",
            id="left",
        ),
        pytest.param(f"python3 -c '{BURN}' & python3 -c '{BURN}'; wait; touch done; sleep 60", id="killed"),
    ],
)
def test_cpu_time_of_all_that_ran(kind, script, tmp_path):
    async def inner() -> SandboxExit:
        config = SandboxConfig(kind=kind)
        spec = SandboxSpec(("bash", "-c", script), workspace=tmp_path, timeout_s=60)
        process = await make_sandbox(config).launch(spec)
        if "touch done" in script:
            await until((tmp_path / "done").exists, 60)
            process.kill()
        return await process.wait()

    assert 0.6 < asyncio.run(inner()).cpu_s < 2.0  # one of the two burns 0.4

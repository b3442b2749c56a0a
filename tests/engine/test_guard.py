"""The engine's process group: what ends it, and what does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import EngineConfig, ModelConfig
from pipeline.engine import server as server_module
from pipeline.engine.server import EngineServer

GUARD = [sys.executable, "-m", "pipeline.engine.guard"]
ROOT = Path(__file__).parents[2]


def start_guard(script: str, **options: Any) -> subprocess.Popen[bytes]:
    """A guard around a shell script; it ends when the returned object, which holds its standard input, goes."""
    command = [*GUARD, "sh", "-c", script]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, cwd=ROOT, **options)


def wait_for(path: Path, deadline_s: float = 20) -> str:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if path.exists() and path.read_text().endswith("\n"):
            return path.read_text()
        time.sleep(0.02)
    raise AssertionError(f"{path} was not written in {deadline_s} s")


def wait_gone(pid: int, deadline_s: float = 20) -> None:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):  # before it was opened, or after
            return
        if state == "Z":
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} still runs after {deadline_s} s")


def test_group_ends_with_a_killed_starter(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    family = f"sleep 300 & echo $$ $! > {pids}; wait"
    starter = (
        "import subprocess, time\n"
        f"subprocess.Popen({[*GUARD, 'sh', '-c', family]!r}, stdin=subprocess.PIPE, start_new_session=True)\n"
        "time.sleep(300)"
    )
    process = subprocess.Popen([sys.executable, "-c", starter], cwd=ROOT)
    child, grandchild = map(int, wait_for(pids).split())
    process.kill()
    process.wait()
    wait_gone(child)
    wait_gone(grandchild)


def test_group_ends_with_the_command_and_the_log_tells_its_exit_code(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with (tmp_path / "log").open("w") as log:
        start_guard(f"sleep 300 & echo $! > {pids}; exit 7", stderr=log).wait(20)
    assert "exit code 7" in (tmp_path / "log").read_text()
    wait_gone(int(wait_for(pids)))


def test_the_warning_signal_is_ignored_below_the_guard(tmp_path: Path) -> None:
    said = tmp_path / "said"
    start_guard(f"kill -USR2 $$; echo alive > {said}").wait(20)
    assert said.read_text() == "alive\n"


class Stubborn(EngineServer):
    """Runs a shell that ignores SIGTERM in place of vLLM."""

    def command(self, model_dir: Path | str, seed: int = 0) -> list[str]:
        return ["sh", "-c", f"trap '' TERM; echo $$ > {model_dir}/pid; while :; do sleep 0.1; done"]


def test_stop_kills_what_ignores_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STOP_GRACE_S", 0.5)
    server = Stubborn(EngineConfig(), ModelConfig(path="unused"), tmp_path / "log", tmp_path / "scratch")
    server.start(tmp_path)
    pid = int(wait_for(tmp_path / "pid"))
    assert server.alive()
    server.close()
    assert not server.alive()
    wait_gone(pid)


def test_the_guard_outlives_a_sigterm_that_the_command_handles(tmp_path: Path) -> None:
    said = tmp_path / "said"
    trap = f"trap 'sleep 0.3; echo tidy > {said}; exit 0' TERM"
    process = start_guard(f"{trap}; echo ready > {tmp_path}/ready; while :; do sleep 0.05; done")
    wait_for(tmp_path / "ready")
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(20)
    assert said.read_text() == "tidy\n"

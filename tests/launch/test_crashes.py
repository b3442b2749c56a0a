"""kill -9 of every part at a random moment: the run ends all the same, and every group ends exactly once."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from run_helpers import assert_every_group_ended_once, find, kill, processes, start, updates_done

SETTINGS = [
    "+experiment=smoke",
    "training.updates=8",
    "evaluation.before=false",
    "evaluation.after=false",
    "tasks.check=false",
    "cluster.max_attempts=6",
    "curriculum=difficulty",
]
PARTS = ["sandbox", "shard", "vllm", "trainer", "launcher"]
DEADLINE_S = 540.0


def wait_for_updates(run_dir: Path, count: int, launcher: subprocess.Popen[str], deadline: float) -> None:
    while updates_done(run_dir) < count and launcher.poll() is None:
        assert time.monotonic() < deadline, run_dir.with_suffix(".log").read_text()[-3000:]
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kill_each_part_once(tmp_path: Path) -> None:
    run_dir, rng = tmp_path / "run", random.Random(time.time_ns())
    deadline = time.monotonic() + DEADLINE_S
    launcher = start(run_dir, *SETTINGS)
    try:
        for number, part in enumerate(PARTS, 1):
            wait_for_updates(run_dir, number, launcher, deadline)
            time.sleep(rng.uniform(0.0, 2.0))
            if part == "launcher":
                launcher.send_signal(signal.SIGKILL)
                launcher.wait()
            else:
                assert kill(run_dir, part, 60.0), f"no {part} to kill"
        assert find(run_dir, "trainer") or (run_dir / "report").exists(), "the run outlives its launcher"
        launcher = start(run_dir, *SETTINGS)
        launcher.wait(deadline - time.monotonic())
    finally:
        launcher.kill()
        for pid, _, _ in list(processes(run_dir)):
            subprocess.run(["kill", "-9", str(pid)], check=False, stderr=subprocess.DEVNULL)
    log = run_dir.with_suffix(".log").read_text()
    assert launcher.returncode == 0, log[-3000:]
    assert_every_group_ended_once(run_dir, updates=8)

"""Runs of `yoke` in tests: start one, find its processes, read what it left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def start(run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    """`yoke train` on ``run_dir``, its output in a file beside it."""
    log = run_dir.with_suffix(".log").open("a")
    command = [sys.executable, "-m", "pipeline", "train", f"run_dir={run_dir}", *overrides]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)


def processes(run_dir: Path) -> Iterator[tuple[int, str, dict[str, str]]]:
    """(pid, command line, environment) of every process below the run's submitit controllers."""
    controllers = {
        record["pid"] for path in run_dir.glob("attempts/*/job.json") if (record := json.loads(path.read_text()))
    }
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    for pid in parents:
        if _descends(pid, controllers, parents):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            yield pid, command, dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _descends(pid: int, ancestors: set[int], parents: dict[int, int]) -> bool:
    while pid > 1:
        pid = parents.get(pid, 0)
        if pid in ancestors:
            return True
    return False


def find(run_dir: Path, what: str) -> int | None:
    """The pid of the trainer or engine rank, the vLLM server, a shard or a sandbox."""
    for pid, command, environment in processes(run_dir):
        rank = {"0": "trainer", "1": "engine"}.get(environment.get("SUBMITIT_LOCAL_GLOBALID", ""))
        if what == rank and "submitit.core._submit" in command:
            return pid
        if what == "vllm" and "vllm.entrypoints" in command and "pipeline.engine.guard" not in command:
            return pid
        if what == "shard" and "pipeline.capture.shard" in command:
            return pid
        if what == "sandbox" and "bwrap" in command.split(" ")[0]:
            return pid
    return None


def kill(run_dir: Path, what: str, timeout_s: float) -> bool:
    """kill -9 one part as soon as it is there. False when it did not appear in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        pid = find(run_dir, what)
        if pid is not None:
            try:
                os.kill(pid, signal.SIGKILL)
                return True
            except ProcessLookupError:
                continue
        time.sleep(0.02)
    return False


def checkpoint_state(run_dir: Path) -> dict[str, Any]:
    """The state in the newest checkpoint."""
    newest = max(path for path in (run_dir / "checkpoints").iterdir() if not path.name.startswith("."))
    state: dict[str, Any] = json.loads((newest / "state.json").read_text())["state"]
    return state


def updates_done(run_dir: Path) -> int:
    """How many updates the metrics know of."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["update"] for line in lines if line.endswith("}")), default=0)


def endings(run_dir: Path) -> Counter[str]:
    """How many groups ended which way."""
    return Counter(ending for ending, _ in checkpoint_state(run_dir)["flow"]["ended"].values())


def assert_every_group_ended_once(run_dir: Path, updates: int) -> None:
    """By the last checkpoint and by the ledgers of all attempts."""
    state = checkpoint_state(run_dir)["flow"]
    assert state["update"] == updates
    assert set(state["ended"]) == {f"g{index:06d}" for index in range(state["next_index"])}, "no group is lost"
    trained = {group for group, (ending, _) in state["ended"].items() if ending == "trained"}
    claimed: dict[str, tuple[int, str]] = {}
    for ledger in sorted(run_dir.glob("attempts/*/ledger.jsonl")):
        attempt = int(ledger.parent.name)
        for entry in map(json.loads, ledger.read_text().splitlines()):
            if entry["what"] != "trained":
                continue
            before = claimed.get(entry["group"])
            assert before is None or before[0] < attempt, "within one attempt no group is trained twice"
            claimed[entry["group"]] = (attempt, entry["reason"])
    counts = Counter(ending for ending, _ in state["ended"].values())
    counted = json.loads((run_dir / "difficulty.json").read_text())
    assert counted["update"] == updates
    for parts in (counted["harnesses"], counted["tasks"]):
        assert sum(own["groups"] for own in parts.values()) == counts["trained"] + counts["skipped"], "each once"
        assert sum(own["no_contrast"] for own in parts.values()) == counts["skipped"]
    for group in trained:
        assert state["ended"][group][1] == claimed[group][1], "what counts is the last attempt's training of it"

"""What one group costs the shared file system: the real engine rank and coordinator, with rollouts that are scripted.

    python -m bench.file_operations          every system call on the run directory, counted by strace
    python -m bench.file_operations --child N [--attempts A]     N groups; prints what Python's audit events count

Set-up is left out: the figures are the difference between runs of 12 and of 4 groups, divided by 8.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

FEW, MANY = 4, 12
GROUP = 8
EVENTS = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.link", "os.listdir", "os.scandir", "os.truncate"})
LINE = re.compile(r"^(?:\d+ +)?(\w+)\(.*")
WRITES = re.compile(r"O_WRONLY|O_RDWR|O_CREAT")


def per_group(attempts: int = 1, by_strace: bool = False) -> dict[str, float]:
    """Operations a group, by name."""
    few, many = (count(groups, attempts, by_strace) for groups in (FEW, MANY))
    each = {name: (many[name] - few[name]) / (MANY - FEW) for name in sorted(many | few)}
    return {name: value for name, value in each.items() if value}


def count(groups: int, attempts: int, by_strace: bool) -> Counter[str]:
    """Operations of a whole run of so many groups, set-up included."""
    with tempfile.TemporaryDirectory(prefix="yoke-files-") as place:
        trace = Path(place) / "trace"
        command = [
            sys.executable,
            "-m",
            "bench.file_operations",
            "--child",
            str(groups),
            "--attempts",
            str(attempts),
            "--place",
            place,
        ]
        strace = ["strace", "-f", "-y", "-e", "trace=file,desc", "-o", str(trace)] if by_strace else []
        done = subprocess.run([*strace, *command], capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return _traced(trace, f"{place}/run") if by_strace else Counter(json.loads(done.stdout.splitlines()[-1]))


def _traced(trace: Path, root: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for line in trace.read_text(errors="replace").splitlines():
        match = LINE.match(line)
        if match and root in line:
            name = match[1]
            found[f"{name} to write" if name == "openat" and WRITES.search(line) else name] += 1
    return found


# --- the run that is counted


def child(groups: int, attempts: int, place: Path) -> Counter[str]:
    """Roll out ``groups`` groups in the last of ``attempts`` attempts; counts audit events below ``place``/run."""
    from pipeline.launch.run_directory import RunDirectory

    run = RunDirectory(place / "run")
    for _ in range(attempts - 1):
        run.new_attempt()
    found: Counter[str] = Counter()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and any(str(run.root) in str(argument) for argument in arguments[:2]):
            found[event] += 1

    rank, coordinator = _parts(run.new_attempt())
    sys.addaudithook(hook)
    asyncio.run(_roll_out(rank, coordinator, groups))
    return found


def _parts(attempt: Any) -> tuple[Any, Any]:
    from pipeline.cli import compose_config
    from pipeline.launch.coordinator import Coordinator
    from pipeline.launch.engine_rank import EngineRank
    from pipeline.records import TaskRef
    from pipeline.stages.flow import FlowState, GroupFlow
    from pipeline.stages.schedule import make_schedule

    config = compose_config(["mix.harnesses=[pi]", f"algorithm.group_size={GROUP}", "algorithm.groups_per_update=1000"])
    config = replace(config, algorithm=replace(config.algorithm, max_outstanding_rollouts=10_000))
    tasks = [TaskRef(f"t{number}", Path("/")) for number in range(64)]  # a place that is there
    flow = GroupFlow(make_schedule(tasks, config), config.algorithm, 10, FlowState(), attempt.number)
    coordinator = Coordinator(config, attempt, flow)
    coordinator.set_phase("train")
    coordinator.register("node0", "", "")
    coordinator.set_weights(coordinator.engines["node0"], f"{attempt.number}.0")
    return EngineRank(config, attempt, 0), coordinator


async def _roll_out(rank: Any, coordinator: Any, groups: int) -> None:
    rank.workshop, rank.coordinator = _Workshop(), _Direct(coordinator)
    rank.up.set()
    for _ in range(groups):
        work = coordinator.lease("node0", 0.0)["work"]
        rank.queued += len(work["indices"])
        await rank._do(work, None)
    coordinator.finish_update(coordinator.flow.ready)


class _Direct:
    """An RPC client that needs no network."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator

    def call(self, method: str, timeout_s: float = 30.0, **arguments: Any) -> Any:
        return getattr(self._coordinator, method)(**arguments)


class _Workshop:
    """Rollouts that end at once."""

    harness_home = Path("/")

    async def roll_out(self, spec: Any, index: int) -> Any:
        import numpy as np

        from pipeline.records import Outcome, PolicyVersion, RolloutRecord, Row, Verdict

        ids, version = np.arange(1000, dtype=np.int32), PolicyVersion(1, 0)
        row = Row(ids, ids > 900, np.zeros(1000, np.float32))
        return RolloutRecord(
            f"{spec.group_id}-{index}", spec.group_id, index, spec.task.task_id, spec.harness, Outcome.SOLVED,
            Verdict(None, float(index % 2), 3), (row,), version, version, 10, 0, 0, 900, 100, 1.0, {},
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", type=int)
    parser.add_argument("--attempts", type=int, default=1)
    parser.add_argument("--place", type=Path)
    given = parser.parse_args()
    if given.child is not None:
        print(json.dumps(child(given.child, given.attempts, given.place)))
        return
    for attempts in (1, 10):
        figures = per_group(attempts, by_strace=True)
        print(f"attempt {attempts}: {sum(figures.values()):.1f} a group of {GROUP}: {json.dumps(figures)}")


if __name__ == "__main__":
    main()

"""Run directories with exports, graded cells without an engine, and a Slurm of two shell scripts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.cli import compose_config
from pipeline.config import Config
from pipeline.launch import evaluation, standalone
from pipeline.launch.run_directory import Attempt, RunDirectory
from pipeline.records import Outcome, PolicyVersion, RolloutRecord, Row, Verdict
from pipeline.stages.evaluation import Cells, write_cell
from pipeline.training.checkpoint import write_atomically

NAMES = ("000001-update-000002", "000002-update-000004")
SBATCH = """#!/bin/sh
for last; do :; done
cat "$last" > {log}/script
env > {log}/env
echo "$(cat {log}/refuses 2> /dev/null)" >&2
[ -e {log}/refuses ] && exit 1
n=$(($(cat {log}/jobs 2> /dev/null || echo 70) + 1)); echo $n > {log}/jobs
echo "Submitted batch job $n"
"""
SQUEUE = """#!/bin/sh
echo "$@" > {log}/asked
cat {log}/queue 2> /dev/null || true
"""


def settings(root: Path, *more: str) -> Config:
    """Two harnesses, two tasks, two rollouts a cell."""
    return compose_config(
        [
            *(f"run_dir={root}", "tasks.check=false", "tasks.train_size=2", "tasks.test_size=2"),
            *("mix.harnesses=[pi,codex]", "evaluation.rollouts_per_task=2", "logging.wandb=disabled"),
            *more,
        ]
    )


def made(config: Config, names: tuple[str, ...] = NAMES) -> RunDirectory:
    """A run directory that training has begun in, with exports."""
    run = RunDirectory(Path(config.run_dir).absolute())
    run.new_attempt()
    run.save_config(config)
    for name in names:
        export(run.models / name)
    return run


def export(place: Path) -> None:
    write_atomically(place, lambda draft: (draft / "config.json").write_text("{}") and None)


def graded(task: str, harness: str, index: int, passed: bool | None = True) -> RolloutRecord:
    outcome = {True: Outcome.SOLVED, False: Outcome.UNSOLVED, None: Outcome.INFRASTRUCTURE}[passed]
    correctness = None if passed is None else float(passed)
    return RolloutRecord(
        rollout_id=f"{harness}-{task}-{index}", group_id=f"{harness}--{task}", index=index, task_id=task,
        harness=harness, outcome=outcome, verdict=Verdict(correctness, correctness, 1),
        rows=(Row(np.zeros(2, np.int32), np.ones(2, bool), np.zeros(2, np.float32)),),
        version=PolicyVersion(1, 0), newest_version=PolicyVersion(1, 0), calls=1, malformed=0, undelivered=0,
        prompt_tokens=1, sampled_tokens=1, wall_s=1.0,
    )  # fmt: skip


Hook = Callable[[Config, Attempt, Cells], None]


def fake_engine(patch: pytest.MonkeyPatch, before: Hook = lambda *_: None, passed: bool | None = True) -> list[Config]:
    """Cells are graded ``passed`` at once. Returns the settings of each engine that would have been started."""
    started: list[Config] = []

    def work_through(config: Config, attempt: Attempt, model_dir: Path, cells: Cells, *_: Any) -> None:
        started.append(config)
        before(config, attempt, cells)
        while work := cells.lease("node0"):
            records = [graded(work["task_id"], work["harness"], index, passed) for index in work["indices"]]
            attempt.check_fence()
            write_cell(Path(work["path"]), records)
            cells.close(work, records)

    patch.setattr(standalone, "work_through", work_through)
    patch.setattr(evaluation, "_check_installed", lambda *_: None)
    return started


class FakeSlurm:
    """``sbatch`` and ``squeue`` in PATH."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        (root / "bin").mkdir(parents=True)
        for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE)):
            (root / "bin" / name).write_text(text.format(log=root))
            (root / "bin" / name).chmod(0o755)
        patch.setenv("PATH", f"{root / 'bin'}:{os.environ['PATH']}")

    def queue(self, *tasks: str) -> None:
        """What squeue tells: ``ARRAY|STATE`` a task."""
        (self.root / "queue").write_text("".join(f"{task}\n" for task in tasks))

    def refuse(self, words: str) -> None:
        (self.root / "refuses").write_text(words)

    @property
    def script(self) -> str:
        return (self.root / "script").read_text()

    @property
    def environment(self) -> dict[str, str]:
        pairs = (line.partition("=") for line in (self.root / "env").read_text().splitlines())
        return {name: value for name, _, value in pairs}

    @property
    def submitted(self) -> int:
        path = self.root / "jobs"
        return int(path.read_text()) - 70 if path.exists() else 0


def finished(run: RunDirectory, label: str, harness: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((evaluation.place(run, label, harness).root / "finished.json").read_text())
    return record

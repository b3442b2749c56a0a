"""An evaluation with failing infrastructure, two kills and shuffled tasks ends with the results of a clean one."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from evaluation_helpers import NAMES, made, settings
from forked import DEADLINE_S, fork
from scripted_evaluation import HUNG, SLOTS, run

from pipeline.launch.evaluation import EvaluationJob
from pipeline.launch.reporting import run_results
from pipeline.launch.run_directory import RunDirectory
from pipeline.report.results import write_results
from pipeline.stages.evaluation import is_graded, read_tries

pytestmark = pytest.mark.slow
JOB = EvaluationJob("scripted", NAMES[0], ("pi", "codex"))
TASKS, ROLLOUTS = 6, 2
ALL = TASKS * len(JOB.harnesses) * ROLLOUTS
KINDS = {"sandbox", "capture", "engine"}


@dataclass(frozen=True)
class Evaluation:
    """One run directory, and processes that evaluate in it."""

    root: Path

    def __post_init__(self) -> None:
        made(self.config)

    @property
    def config(self) -> Any:
        return settings(
            self.root, f"tasks.test_size={TASKS}", f"evaluation.rollouts_per_task={ROLLOUTS}", "evaluation.retries=1",
            "harness.retries=1", f"concurrency={SLOTS}", "model.path=/nowhere",
        )  # fmt: skip

    def to_the_end(self, order: int, spoil: bool = False) -> None:
        process = fork(self.log, run, self.config, JOB, order, spoil)
        process.join(DEADLINE_S)
        assert process.exitcode == 0, self.log.read_text()[-4000:]

    def until_killed(self, order: int, after: int) -> None:
        """``kill -9`` when so many tries are over, all slots are busy with the next ones, and some grade is written."""
        (self.root / HUNG).unlink(missing_ok=True)
        process = fork(self.log, run, self.config, JOB, order, True, after)
        deadline = time.monotonic() + DEADLINE_S
        while not ((self.root / HUNG).exists() and self.grades()):
            assert process.is_alive(), self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, "it did not get so far"
            time.sleep(0.05)
        process.kill()
        process.join(DEADLINE_S)
        assert process.exitcode == -9

    @property
    def log(self) -> Path:
        return self.root.with_suffix(".log")

    @property
    def place(self) -> Path:
        return RunDirectory(self.root).evaluation(JOB.label)

    def results(self) -> tuple[bytes, dict[str, Any]]:
        """results.json without what was tried again; and that."""
        found = run_results(self.config, RunDirectory(self.root), [])
        again: dict[str, Any] = found.pop("retries")[JOB.label]
        write_results(self.root / "results.json", found)
        return (self.root / "results.json").read_bytes(), again

    def grades(self) -> dict[tuple[str, int], str]:
        """(cell, index) → its graded rollout; there is never a second one."""
        graded = [record for record in read_tries(self.place) if is_graded(record)]
        assert max(Counter((record.group_id, record.index) for record in graded).values(), default=1) == 1
        return {(record.group_id, record.index): record.rollout_id for record in graded}


def test_failures_kills_and_order_change_nothing(tmp_path: Path) -> None:
    clean, rough = Evaluation(tmp_path / "clean"), Evaluation(tmp_path / "rough")
    clean.to_the_end(0)
    rough.until_killed(1, 12)
    rough.until_killed(2, 9)
    before = rough.grades()
    assert 0 < len(before) < ALL, "the kills came in the middle"
    rough.to_the_end(3, spoil=True)
    assert before.items() <= rough.grades().items(), "what was graded before the kills was not rolled out again"
    (expected, nothing), (found, again) = clean.results(), rough.results()
    assert found == expected
    assert (rough.place / "cohort.json").read_bytes() == (clean.place / "cohort.json").read_bytes()
    assert (nothing["rollouts"], nothing["tries"], nothing["causes"]) == (0, ALL, {})
    assert again["rollouts"] and set(again["causes"]) <= KINDS
    assert again["tries"] == ALL + sum(again["causes"].values())
    (entry,) = json.loads(found)["checkpoints"]
    assert (entry["graded"], entry["provisional"]) == (ALL, False)
    assert 0 < entry["pass@1"] < entry["pass@k"]["2"] < 1 and 0 < entry["timeout_rate"] < 1, (
        "there is something to lose"
    )

"""The tasks of a run, checked before anything is spent on it: their files at every start, for what they give away;
once a run, that each task's oracle scores 1 and doing nothing scores 0.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time

from pipeline.config import Config, UserError
from pipeline.launch.data import load_split
from pipeline.launch.run_directory import Attempt, RunDirectory
from pipeline.report.bar import Bar
from pipeline.report.store import write_json
from pipeline.sandbox.base import make_sandbox
from pipeline.stages.gates import check_tasks
from pipeline.stages.integrity import Finding, inspect
from pipeline.tasks.harbor import HarborTask

PLACE = "gates.json"  # in the run directory, once its tasks are checked
GATES_S = 7200.0
POLL_S = 1.0
SOUND = "each solution that there is scores 1, doing nothing scores 0"
SHOWN = 3  # problems of one message
log = logging.getLogger("yoke.gates")


def inspect_files(config: Config, train: list[HarborTask], test: list[HarborTask]) -> list[Finding]:
    """What the tasks' files give away and tasks.gates only warns of, logged. Raises UserError for what is an error."""
    gates = config.tasks.gates
    findings = inspect(train, test, gates)
    errors = [finding for finding in findings if getattr(gates, finding.kind) == "error"]
    if errors:
        shown = "; ".join(finding.text for finding in errors[:SHOWN])
        kinds = ", ".join(f"tasks.gates.{kind}" for kind in dict.fromkeys(finding.kind for finding in errors))
        raise UserError(
            f"{len(errors)} faults in the task set ({kinds}): {shown}{'; …' if len(errors) > SHOWN else ''} "
            "(docs/tasks.md says how to allow what is none)"
        )
    for finding in findings:
        log.warning("tasks: %s", finding.text)
    return findings


def ensure_gates(config: Config, run: RunDirectory) -> int | None:
    """Check the tasks where ``tasks.check`` asks for it and no earlier start of the run did. Returns how many were
    checked now, None when there was nothing to do.

    Needs a sandbox and CPU time, so a job runs it (rank 0, before the other ranks begin), not the login node.
    Raises UserError that names the first tasks that fail.
    """
    place = run.root / PLACE
    if not config.tasks.check or place.exists():
        return None
    started = time.monotonic()
    count = check_all(config, run)
    write_json(place, {"tasks": count, "wall_s": time.monotonic() - started})
    return count


def check_all(config: Config, run: RunDirectory, sample: int = 0) -> int:
    """Oracle → 1 and nop → 0 on every task, or on ``sample`` of each split; returns their number. Raises UserError that
    names the first that fail.
    """
    splits = [load_split(config, run, split) for split in ("train", "test")]
    chosen = random.Random(config.seed)
    tasks = [task for split in splits for task in chosen.sample(split, min(sample or len(split), len(split)))]
    with Bar("tasks checked", len(tasks), stream=sys.stderr) as bar:
        failures = asyncio.run(
            check_tasks(
                tasks,
                make_sandbox(config.sandbox),
                config.concurrency,
                system=config.sandbox.image,
                progress=lambda done, total: bar.advance(1, ""),
            )
        )
    if failures:
        shown = "; ".join(str(failure) for failure in failures[:SHOWN])
        raise UserError(f"{len(failures)} of {len(tasks)} tasks fail their own check: {shown}")
    return len(tasks)


def pass_gates(config: Config, attempt: Attempt, first: bool) -> None:
    """Nothing is rolled out before the tasks are checked: the ``first`` rank does it, the others wait for its word.

    Raises UserError on the first rank when tasks fail, RuntimeError on the others; TimeoutError after GATES_S.
    """
    if first:
        ensure_gates(config, attempt.run)
        return
    deadline = time.monotonic() + GATES_S
    while config.tasks.check and not (attempt.run.root / PLACE).exists():
        if failed := attempt.read("failed"):
            raise RuntimeError(f"the {failed['rank']} rank failed: {failed['text']}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the first rank has not checked the tasks within {GATES_S:g} s ({PLACE} is missing)")
        attempt.check_fence()
        time.sleep(POLL_S)

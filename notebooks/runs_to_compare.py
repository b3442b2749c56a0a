"""Runs for compare_runs.ipynb: from run directories, from W&B, or small made-up ones; and how they are drawn."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot
from matplotlib.figure import Figure

from pipeline.config import UserError
from pipeline.launch.evaluation import records
from pipeline.launch.run_directory import RunDirectory
from pipeline.records import Outcome, PolicyVersion, RolloutRecord, Row, Verdict
from pipeline.report.metrics import by_harness, graded, read_metrics, solved
from pipeline.report.results import difference
from pipeline.report.shares import harness_shares
from pipeline.report.statistics import wilson
from pipeline.report.store import write_group
from pipeline.report.svg import Chart

FROM_WANDB = "wandb:"  # then ENTITY/PROJECT/RUN
HARNESSES = ("codex", "pi")
TASKS, UPDATES = 40, 12

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class ComparedRun:
    """What is compared: one metrics entry an update, and the rollouts of the two evaluations (W&B has none)."""

    name: str
    metrics: Sequence[Entry]
    before: Sequence[RolloutRecord] = ()
    after: Sequence[RolloutRecord] = ()


def load(places: Iterable[str]) -> list[ComparedRun]:
    """Run directories, or wandb:ENTITY/PROJECT/RUN. Raises UserError for a place that holds no metrics."""
    return [_from_wandb(place) if place.startswith(FROM_WANDB) else _from_files(Path(place)) for place in places]


def _from_files(place: Path) -> ComparedRun:
    run = RunDirectory(place.expanduser())
    metrics = read_metrics(run.root)
    if not metrics:
        raise UserError(f"{place} has no metrics: it is no run's directory, or the run has not begun")
    return ComparedRun(place.name, metrics, records(run, "before"), records(run, "after"))


def _from_wandb(place: str) -> ComparedRun:
    import wandb

    run = wandb.Api().run(place.removeprefix(FROM_WANDB))
    metrics = merged(run.scan_history())
    if not metrics:
        raise UserError(f"{place} has no metrics")
    return ComparedRun(run.name, metrics)


def merged(history: Iterable[Entry]) -> list[dict[str, Any]]:
    """W&B's rows as one entry an update, as metrics.jsonl has them: what was logged again counts as logged last."""
    entries: dict[int, dict[str, Any]] = {}
    for row in history:
        own = {name: value for name, value in row.items() if value is not None and not name.startswith("_")}
        if (update := own.get("update")) is not None:
            entries.setdefault(int(update), {}).update(own)
    return [entries[update] for update in sorted(entries)]


def pass_table(run: ComparedRun) -> str:
    """pass@1 before and after by harness, with Wilson's 95% intervals and the paired difference, in Markdown."""
    lines = ["| harness | before | after | difference |", "|---|---|---|---|"]
    before, after = by_harness(run.before), by_harness(run.after)
    for harness in sorted(before.keys() & after.keys()):
        change = difference(before[harness], after[harness])
        told = change.sentence() if change else ""
        lines.append(f"| {harness} | {_rate(before[harness])} | {_rate(after[harness])} | {told} |")
    return "\n".join(lines)


def _rate(evaluated: Sequence[RolloutRecord]) -> str:
    known = graded(evaluated)
    if not known:
        return "not graded"
    passed = sum(map(solved, known))
    low, high = wilson(passed, len(known))
    return f"{100 * passed / len(known):.1f}% ({100 * low:.1f} to {100 * high:.1f}, n = {len(known)})"


# --- pictures


def draw(charts: Sequence[Chart]) -> Figure:
    """Charts of the report side by side."""
    figure, axes = pyplot.subplots(1, len(charts), figsize=(4 * len(charts), 3), layout="constrained", squeeze=False)
    for place, chart in zip(axes[0], charts, strict=True):
        for line in chart.kept:
            place.plot(*zip(*line.points, strict=True), label=line.name)
        place.set(title=chart.title, xlabel="update")
        place.legend()
    return figure


def draw_shares(run: ComparedRun) -> Figure:
    """What each harness has of the rollouts, rows, tokens and of the loss's weight."""
    shares = harness_shares(run.metrics)
    headings = sorted({heading for own in shares.values() for heading in own})
    figure, place = pyplot.subplots(figsize=(6, 2.5), layout="constrained")
    below = np.zeros(len(headings))
    for harness, own in shares.items():
        widths = np.array([own.get(heading, 0.0) for heading in headings])
        place.barh(headings, widths, left=below, label=harness)
        below += widths
    place.set(title=f"{run.name}: shares by harness", xlim=(0, 1))
    place.legend()
    return figure


# --- made-up runs


def make_up(root: Path, name: str, gain: float, seed: int) -> Path:
    """A small run directory: two harnesses, of which codex makes three rows a rollout; ``gain``: what training adds to
    the share of solved tasks.
    """
    chance = random.Random(seed)
    place = root / name
    for label, better in (("before", 0.0), ("after", gain)):
        for harness in HARNESSES:
            # Task by task the same luck before and after, and in all runs: a task is as hard as it is.
            luck = [random.Random(f"{harness}/{task}").random() + 0.1 * chance.random() for task in range(TASKS)]
            own = [_rollout(f"t{task:02}", harness, drawn < 0.35 + better, task) for task, drawn in enumerate(luck)]
            write_group(place / "evaluation" / label / f"{harness}.parquet", own)
    lines = [json.dumps(_entry(update, gain, chance)) for update in range(1, UPDATES + 1)]
    (place / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return place


def _rollout(task: str, harness: str, passed: bool, index: int) -> RolloutRecord:
    row = Row(np.arange(4, dtype=np.int32), np.arange(4) > 1, np.full(4, -0.5, np.float32))
    return RolloutRecord(
        rollout_id=f"{harness}-{task}",
        group_id=harness,
        index=index,
        task_id=task,
        harness=harness,
        outcome=Outcome.SOLVED if passed else Outcome.UNSOLVED,
        verdict=Verdict(None, float(passed), 4),
        rows=(row,),
        version=PolicyVersion(1, 0),
        newest_version=PolicyVersion(1, 0),
        calls=3,
        malformed=0,
        undelivered=0,
        prompt_tokens=2,
        sampled_tokens=2,
        wall_s=1.0,
    )


def _entry(update: int, gain: float, chance: random.Random) -> dict[str, float]:
    entry = {"update": update, "time": float(update), "batch/rollouts_per_step": 32.0}
    entry |= {"batch/samples_per_step": 64.0, "batch/trained_tokens_per_step": 9000.0}
    rows = {"codex": 0.75, "pi": 0.25}
    for harness in HARNESSES:
        passed = 0.35 + gain * update / UPDATES + 0.04 * (chance.random() - 0.5)
        entry |= {f"{harness}/pass_rate": passed, f"{harness}/reward": 1.05 * passed, f"{harness}/tool_calls": 4.0}
        entry |= {f"{harness}/malformed_rate": 0.02, f"{harness}/rollout_share": 0.5, f"{harness}/token_share": 0.5}
        entry |= {f"{harness}/row_share": rows[harness], f"{harness}/loss_weight_share": 0.5}
    return entry

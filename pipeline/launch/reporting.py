"""The end of a run: results.json, the table, the learning curve; made from the run directory alone, so it can be
done again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.config import Config
from pipeline.harness.base import get_harness
from pipeline.launch.data import split_size
from pipeline.launch.evaluation import labels, late_results, pinned, planned_of, records
from pipeline.launch.local import living
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.slurm import SlurmError, queued
from pipeline.records import RolloutRecord
from pipeline.report.difficulty_table import print_difficulty
from pipeline.report.metrics import MetricsLog, read_metrics
from pipeline.report.plot import learning_curve
from pipeline.report.results import Meta, build_results, checkpoint_summary, write_results
from pipeline.report.store import write_text
from pipeline.report.table import markdown_table, print_results
from pipeline.stages.evaluation import INCOMPLETE
from pipeline.stages.weights import update_of


def report_run(config: Config, run: RunDirectory) -> int:
    """Write and show the report. Returns 3 when rollouts of an evaluation are ungraded, else 0."""
    _log_late_results(config, run)
    metrics = read_metrics(run.root)
    results = run_results(config, run, metrics)
    learning_curve(metrics, run.report / "curve.png", results)
    write_text(run.report / "table.md", markdown_table(results))
    write_results(run.results, results)
    print_results(results, Console())
    if run.difficulty.exists():
        print_difficulty(json.loads(run.difficulty.read_text()), Console())
    print(f"results: {run.results}\ncurve:   {run.report / 'curve.png'}")
    wanted = [label for label in ("before", "after") if getattr(config.evaluation, label)]
    whole = all((results[label] or {"coverage": 0.0})["coverage"] >= 1.0 for label in wanted)
    return 0 if whole else INCOMPLETE


def run_results(config: Config, run: RunDirectory, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The contents of results.json, from what the run has so far. Writes nothing."""
    before, after = records(run, "before"), records(run, "after")
    return build_results(before, after, metrics, _meta(config, run, [*before, *after]), _checkpoints(config, run))


def _checkpoints(config: Config, run: RunDirectory) -> list[dict[str, Any]]:
    """The evaluations of checkpoints, in the order of their updates."""
    found = {label: records(run, label) for label in labels(run)}
    return [
        checkpoint_summary(label, update_of(pinned(run, label) or ""), own, planned_of(config, run, label, own))
        for label, own in found.items()
    ]


def _log_late_results(config: Config, run: RunDirectory) -> None:
    """Results that came in after the training ended: metrics have one writer, so not while the run is alive."""
    if _may_be_alive(run):
        return
    late = late_results(config, run, read_metrics(run.root))
    if late:
        with MetricsLog(run.root, config.logging, asdict(config)) as log:
            for update, values in late:
                log.log(update, values)


def _may_be_alive(run: RunDirectory) -> bool:
    try:
        return bool(living(run) or queued(run))
    except SlurmError:
        return True


def _meta(config: Config, run: RunDirectory, records: Sequence[RolloutRecord]) -> Meta:
    done = run.done or {}
    return Meta(
        seed=config.seed,
        rollouts=int(done.get("rollouts", 0)),
        wall_s={**_gates(run.root / "gates.json"), **done.get("wall_s", {})},
        harness_versions={name: _version(name, records) for name in config.mix.harnesses},
        set_aside=done.get("set_aside", {}),
        planned=_planned(config, run) if records else 0,  # else there may be no tasks yet, and nobody asks
    )


def _version(harness: str, records: Sequence[RolloutRecord]) -> str:
    """The version that ran, which is not today's after an upgrade; today's if nothing was evaluated."""
    ran = {str(record.info["harness_version"]) for record in records if record.harness == harness and record.info}
    return ", ".join(sorted(ran)) or get_harness(harness).version


def _gates(path: Path) -> dict[str, Any]:
    return {"gates": json.loads(path.read_text())["wall_s"]} if path.exists() else {}


def _planned(config: Config, run: RunDirectory) -> int:
    return split_size(config, run, "test") * len(config.mix.harnesses) * config.evaluation.rollouts_per_task

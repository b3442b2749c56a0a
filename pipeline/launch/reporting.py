"""The end of a run: results.json, the table, the learning curve; made from the run directory alone, so it can be
done again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.config import Config
from pipeline.harness.base import get_harness
from pipeline.launch.data import split_size
from pipeline.launch.run_directory import RunDirectory
from pipeline.records import RolloutRecord
from pipeline.report.metrics import read_metrics
from pipeline.report.plot import learning_curve
from pipeline.report.results import Meta, build_results, write_results
from pipeline.report.store import write_text
from pipeline.report.table import markdown_table, print_results
from pipeline.stages.evaluation import INCOMPLETE, read_cell


def report_run(config: Config, run: RunDirectory) -> int:
    """Write and show the report. Returns 3 when rollouts of an evaluation are ungraded, else 0."""
    metrics = read_metrics(run.root)
    results = run_results(config, run, metrics)
    learning_curve(metrics, run.report / "curve.png", results)
    write_text(run.report / "table.md", markdown_table(results))
    write_results(run.results, results)
    print_results(results, Console())
    print(f"results: {run.results}\ncurve:   {run.report / 'curve.png'}")
    wanted = [label for label in ("before", "after") if getattr(config.evaluation, label)]
    whole = all((results[label] or {"coverage": 0.0})["coverage"] >= 1.0 for label in wanted)
    return 0 if whole else INCOMPLETE


def run_results(config: Config, run: RunDirectory, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The contents of results.json, from what the run has so far. Writes nothing."""
    before, after = _evaluated(run, "before"), _evaluated(run, "after")
    return build_results(before, after, metrics, _meta(config, run, [*before, *after]))


def _evaluated(run: RunDirectory, label: str) -> list[RolloutRecord]:
    return [record for path in sorted(run.evaluation(label).glob("*.parquet")) for record in read_cell(path)]


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

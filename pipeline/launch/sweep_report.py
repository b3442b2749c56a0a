"""The report of a sweep: how each of its runs stands, as a table and as learning curves side by side.

Made from what the runs have left so far, so it can be asked for at any time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.harness.base import register
from pipeline.launch.reporting import run_results
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.run_state import State, standing
from pipeline.launch.sweep_points import Member, read_members
from pipeline.report.metrics import read_metrics
from pipeline.report.plot import side_by_side
from pipeline.report.store import write_json, write_text
from pipeline.report.sweep_table import markdown, print_sweep
from pipeline.training.checkpoint import STATE_FILE, newest

SCHEMA = 1
TAKEN = ("before", "after", "difference", "provisional")  # from a run's own results


def report_sweep(root: Path) -> int:
    """Write results.json, table.md and curves.png below ``root``/report, and show the table."""
    points, curves = [], []
    for member in read_members(root):
        point, metrics, results = _point(root, member)
        points.append(point)
        curves.append((f"{member.name.replace('+', chr(10))}\n{point['state']}", metrics, results))
    sweep = {"schema": SCHEMA, "name": root.name.removeprefix("sweep-"), "points": points}
    place = root / "report"
    side_by_side(curves, place / "curves.png")
    write_text(place / "table.md", markdown(sweep))
    write_json(place / "results.json", sweep)
    print_sweep(sweep, Console())
    print(f"results: {place / 'results.json'}\ncurves:  {place / 'curves.png'}")
    return 0


def _point(root: Path, member: Member) -> tuple[dict[str, Any], Sequence[Mapping[str, Any]], Mapping[str, Any] | None]:
    """(the point's row, its metrics, its results so far or None)."""
    run = RunDirectory(root / member.name)
    now = standing(run)
    metrics = read_metrics(run.root)
    results = _results(run, now.state, metrics)
    rewards = [entry["reward"] for entry in metrics if "reward" in entry]
    row = {
        "name": member.name,
        "overrides": list(member.overrides),
        "state": str(now.state),
        "job": now.job,
        "reason": now.reason,
        "updates": max((entry["update"] for entry in metrics), default=0),
        "updates_planned": run.saved_config().training.updates if run.is_ours() else None,
        "reward": rewards[-1] if rewards else None,
        "wall_s": sum(_wall_s(run).values()) or None,
    }
    return row | {key: (results or {}).get(key) for key in TAKEN}, metrics, results


def _results(run: RunDirectory, state: State, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The run's own results.json once it is done; before that, the same from what there is. None before its start."""
    if state is State.DONE and run.results.exists():
        results: dict[str, Any] = json.loads(run.results.read_text())
        return results
    if not run.is_made:
        return None
    config = run.saved_config()
    register(config.harness.recipes)
    return run_results(config, run, metrics)


def _wall_s(run: RunDirectory) -> dict[str, float]:
    """Seconds by phase, over all attempts: of the whole run, or up to its newest checkpoint."""
    if done := run.done:
        return dict(done["wall_s"])
    checkpoint = newest(run.checkpoints)
    if checkpoint is None:
        return {}
    return dict(json.loads((checkpoint / STATE_FILE).read_text())["state"]["wall_s"])

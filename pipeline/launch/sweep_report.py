"""The report of a sweep: how each of its runs stands, as a page, as a table, as learning curves side by side.

Made from what the runs have left so far, so it can be asked for at any time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import Console

from pipeline.harness.base import register
from pipeline.launch.reporting import PAGE, compare, run_results
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.sweep import Standing, job_of, look
from pipeline.launch.sweep_points import Member, read_members
from pipeline.report.metrics import read_metrics
from pipeline.report.store import write_json, write_text
from pipeline.report.sweep_page import write_sweep_page
from pipeline.report.sweep_table import markdown, print_sweep

SCHEMA = 1
CURVES = "curves.png"
TAKEN = ("before", "after", "difference", "provisional")  # from a run's own results
Metrics = Sequence[Mapping[str, Any]]
Results = Mapping[str, Any]


def report_sweep(root: Path, form: str = "") -> int:
    """Write results.json, table.md, curves.png and the page below ``root``/report, and show the table.

    ``form``: "json" or "md" for the results or the table, and nothing else, on stdout.
    """
    points, curves = [], []
    members = read_members(root)
    first = RunDirectory(root / members[0].name)
    for member, standing in zip(members, look(root, [member.name for member in members]), strict=True):
        run = RunDirectory(root / member.name)
        metrics = read_metrics(run.root)
        results = _results(run, standing, metrics)
        against = compare(first, run) if run.root != first.root else None
        taken = {key: (results or {}).get(key) for key in TAKEN}
        points.append({**_row(member, run, standing, metrics), **taken, "against": against, "page": _page(run)})
        curves.append((f"{member.name.replace('+', chr(10))}\n{standing['state']}", metrics, results))
    sweep = {"schema": SCHEMA, "name": root.name.removeprefix("sweep-"), "points": points}
    _write(root / "report", sweep, curves)
    _show(root / "report", sweep, form)
    return 0


def _write(place: Path, sweep: Mapping[str, Any], curves: Sequence[tuple[str, Metrics, Results | None]]) -> None:
    from pipeline.report.plot import side_by_side  # a second to import

    side_by_side(curves, place / CURVES)
    write_text(place / "table.md", markdown(sweep))
    write_json(place / "results.json", sweep)
    write_sweep_page(place / PAGE, sweep, [metrics for _, metrics, _ in curves])


def _show(place: Path, sweep: Mapping[str, Any], form: str) -> None:
    if form:
        print(json.dumps(sweep, indent=2) if form == "json" else markdown(sweep))
        return
    print_sweep(sweep, Console())
    print(f"results: {place / 'results.json'}\ncurves:  {place / CURVES}\npage:    {place / PAGE}")


def _page(run: RunDirectory) -> str | None:
    """The way from the sweep's page to the run's own, if it was written."""
    there = (run.report / PAGE).exists()
    return f"../{quote(run.root.name)}/{run.report.name}/{PAGE}" if there else None


def _row(member: Member, run: RunDirectory, standing: Standing, metrics: Metrics) -> dict[str, Any]:
    """What is known of a point besides its evaluations."""
    rewards = [entry["reward"] for entry in metrics if "reward" in entry]
    return {
        "name": member.name,
        "overrides": list(member.overrides),
        "state": standing["state"],
        "job": job_of(standing),
        "reason": standing["reason"],
        "updates": standing["updates"]["done"],
        "updates_planned": standing["updates"]["planned"],
        "reward": rewards[-1] if rewards else None,
        "wall_s": sum(_wall_s(run, standing).values()) or None,
    }


def _results(run: RunDirectory, standing: Standing, metrics: Metrics) -> Results | None:
    """The run's own results.json once it is done; before that, the same from what there is. None before its start."""
    if standing["state"] == "done" and run.results.exists():
        results: Results = json.loads(run.results.read_text())
        return results
    if not run.is_made:
        return None
    config = run.saved_config()
    register(config.harness.recipes)
    return run_results(config, run, metrics)


def _wall_s(run: RunDirectory, standing: Standing) -> Mapping[str, float]:
    """Seconds by phase, over all attempts: of the whole run, or up to its newest checkpoint."""
    if done := run.done:
        return dict(done["wall_s"])
    if (checkpoint := standing["checkpoint"]["newest"]) is None:
        return {}
    from pipeline.training.checkpoint import STATE_FILE  # seconds to import

    return dict(json.loads((run.checkpoints / checkpoint / STATE_FILE).read_text())["state"]["wall_s"])

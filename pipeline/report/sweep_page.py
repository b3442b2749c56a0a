"""The page of a sweep: its runs by their settings, what each does otherwise than the first, and their curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from pipeline.report.curves import LEARNING, Metrics, series
from pipeline.report.markup import Book, document, sentence_list, table
from pipeline.report.store import write_text
from pipeline.report.svg import COLORS, Chart
from pipeline.report.sweep_table import BY_HARNESS, HEADINGS, harness_rows, notes, point_rows, three_cells
from pipeline.report.table import ALL, NOTHING, against_sentences, change_points, change_sentences

AGAINST = "against the first, points"

Point = Mapping[str, Any]


def write_sweep_page(path: Path, sweep: Mapping[str, Any], metrics: Sequence[Metrics]) -> None:
    """Publish the page. ``sweep``: of its results.json; ``metrics`` of each point, in the same order."""
    write_text(path, sweep_page(sweep, metrics))


def sweep_page(sweep: Mapping[str, Any], metrics: Sequence[Metrics]) -> str:
    """The whole page as text."""
    points, book = sweep["points"], Book()
    sections = (
        ("runs", "The runs", _runs(points)),
        ("against", "Against the first run", _against(points)),
        ("curves", "Training curves", book.figures(sweep_charts([point["name"] for point in points], metrics))),
        ("harnesses", "By harness", _by_harness(points)),
        ("changes", "Before and after, run by run", sentence_list(_changes(points))),
    )
    return document(f"Yoke: sweep {sweep['name']}", sections, book)


def sweep_charts(names: Sequence[str], metrics: Sequence[Metrics]) -> list[Chart]:
    """A chart a metric with a line a run; where the colours do not suffice, a chart a run, all of the same height."""
    runs = list(enumerate(zip(names, metrics, strict=True)))
    if len(runs) <= COLORS:
        return [
            Chart(title, [series(own, metric, name, color) for color, (name, own) in runs], percent)
            for metric, title, percent in LEARNING
        ]
    top = max((entry.get("reward", 0.0) for own in metrics for entry in own), default=0.0)
    lines = list(enumerate(LEARNING[:2]))
    return [
        Chart(name, [series(own, metric, title, color) for color, (metric, title, _) in lines], top=top)
        for _, (name, own) in runs
    ]


def _runs(points: Sequence[Point]) -> str:
    keys, settings = _settings(points)
    rows = (
        (name, *settings[name], *cells, change_points((point["against"] or {}).get("difference")), wall)
        for point, (name, *cells, wall) in zip(points, point_rows(points, three_cells), strict=True)
    )
    links = {point["name"]: point["page"] for point in points if point["page"]}
    shown = table("Every run of the sweep; its name leads to its page", _headings(keys), rows, links)
    missing = (
        []
        if len(links) == len(points)
        else ["Runs without a link have no page of their own yet: yoke report RUN makes it."]
    )
    return shown + "".join(f"<p>{escape(note)}</p>" for note in (*notes(points), *missing))


def _headings(keys: Sequence[str]) -> tuple[str, ...]:
    return HEADINGS[0], *keys, *HEADINGS[1:-1], AGAINST, HEADINGS[-1]


def _settings(points: Sequence[Point]) -> tuple[list[str], dict[str, list[str]]]:
    """(the swept keys, run → its value of each)."""
    own = {point["name"]: dict(word.lstrip("+").split("=", 1) for word in point["overrides"]) for point in points}
    keys = list(dict.fromkeys(key for values in own.values() for key in values))
    return keys, {name: [values.get(key, NOTHING) for key in keys] for name, values in own.items()}


def _against(points: Sequence[Point]) -> str:
    lines = [
        (f"{point['name']}, {harness}" if harness != ALL else point["name"], text)
        for point in points[1:]
        for harness, text in against_sentences(point["against"])
    ]
    if not lines:
        return "<p>No held-out task was evaluated after training both in the first run and in another.</p>"
    rule = f"After training, against {points[0]['name']}, on the tasks and harnesses that both evaluated."
    return f"<p>{escape(rule)}</p>{sentence_list(lines)}"


def _by_harness(points: Sequence[Point]) -> str:
    rows = list(harness_rows(points, three_cells))
    return table("Held-out tasks by harness; below each figure its 95% interval", BY_HARNESS, rows) if rows else ""


def _changes(points: Sequence[Point]) -> Iterator[tuple[str, str]]:
    """(run, what it changed), over all its harnesses."""
    for point in points:
        for harness, text in change_sentences(point["difference"]):
            if harness == ALL or len(point["difference"]["harnesses"]) == 1:
                yield point["name"], text

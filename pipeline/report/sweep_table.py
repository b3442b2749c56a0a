"""The table of a sweep, for a terminal (rich) and as Markdown, from the contents of its results.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipeline.report.table import NARROW, NOTHING, change_points, rate

HELD_OUT = ("pass@1 before", "pass@1 after", "change, points")
HEADINGS = ("run", "state", "updates", "reward", *HELD_OUT, "wall time")
BY_HARNESS = ("run", "harness", *HELD_OUT)
SHORT = "pass@1, before → after"  # a terminal has no room for the three
LEFT = ("run", "harness", "state")  # columns of words
SIDES = ("before", "after", "difference")

Row = Mapping[str, Any]
HeldOut = Callable[[Row | None, Row | None, Row | None], tuple[str, ...]]  # before, after, difference → cells


def point_rows(points: Sequence[Row], held_out: HeldOut) -> Iterator[tuple[str, ...]]:
    """One row of cells a point; what it has not yet is a dash. ``held_out`` makes the cells of its evaluations."""
    for point in points:
        yield (
            point["name"],
            point["state"],
            f"{point['updates']}/{point['updates_planned']}" if point["updates_planned"] else NOTHING,
            NOTHING if point["reward"] is None else f"{point['reward']:.3f}",
            *held_out(*(point[side] for side in SIDES)),
            _clock(point["wall_s"]),
        )


def harness_rows(points: Sequence[Row], held_out: HeldOut) -> Iterator[tuple[str, ...]]:
    """One row of cells a point and harness, for points that were evaluated with several."""
    for point in points:
        names = sorted({name for side in ("before", "after") for name in _harnesses(point[side])})
        for name in names if len(names) > 1 else ():
            yield point["name"], name, *held_out(*(_harnesses(point[side]).get(name) for side in SIDES))


def notes(points: Sequence[Row]) -> list[str]:
    """What the figures do not say: why a run ended early, and whose evaluations lack rollouts."""
    said = [f"{point['name']}: {point['reason']}" for point in points if point["reason"]]
    whose = [point["name"] for point in points if point["provisional"]]
    return said + ([f"Provisional, some rollouts are ungraded: {', '.join(whose)}."] if whose else [])


def markdown(results: Row) -> str:
    """Table, table by harness and notes."""
    points = results["points"]
    parts = [f"# Sweep {results['name']}", _markdown(HEADINGS, point_rows(points, three_cells))]
    if by_harness := list(harness_rows(points, three_cells)):
        parts.append(_markdown(BY_HARNESS, by_harness))
    return "\n\n".join([*parts, *notes(points)]) + "\n"


def print_sweep(results: Row, console: Console | None = None) -> None:
    """Show the tables and the notes."""
    console = console or Console()
    points = results["points"]
    console.print(_rich(f"Sweep {results['name']}", HEADINGS, point_rows(points, _one_cell)))
    if by_harness := list(harness_rows(points, _one_cell)):
        console.print(_rich("By harness", BY_HARNESS, by_harness))
    for note in notes(points):
        console.print(note, highlight=False, markup=False)


def three_cells(before: Row | None, after: Row | None, change: Row | None) -> tuple[str, ...]:
    """A column each for before, after and the change."""
    return rate(before), rate(after), change_points(change)


def _one_cell(before: Row | None, after: Row | None, change: Row | None) -> tuple[str, ...]:
    sides = [rate(side).replace("\n", " ") for side in (before, after) if side]
    return ("\n→ ".join(sides) or NOTHING,)


def _harnesses(side: Row | None) -> Mapping[str, Any]:
    return side["harnesses"] if side else {}


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02} min" if hours else f"{seconds / 60:.1f} min"


def _markdown(headings: Sequence[str], rows: Iterable[tuple[str, ...]]) -> str:
    rule = ["---" if heading in LEFT else "---:" for heading in headings]
    return "\n".join("| " + " | ".join(cells).replace("\n", " ") + " |" for cells in (headings, rule, *rows))


def _rich(title: str, headings: Sequence[str], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, **NARROW)
    shown = [SHORT if heading == HELD_OUT[0] else heading for heading in headings if heading not in HELD_OUT[1:]]
    for heading in shown:
        justify: Literal["left", "right"] = "left" if heading in LEFT else "right"
        table.add_column(heading.replace(", ", ",\n"), justify=justify, no_wrap=heading != "run", overflow="fold")
    for name, *cells in rows:
        table.add_row(name.replace("+", "\n+"), *cells)
    return table

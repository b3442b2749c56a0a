"""Which charts the page has, from metrics.jsonl and results.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.report.statistics import Trend, trend
from pipeline.report.svg import Chart, Point, Series
from pipeline.report.table import ALL

Metrics = Sequence[Mapping[str, Any]]

# Metric, title of its chart, whether it is a fraction.
LEARNING = (
    ("reward", "Reward", False),
    ("pass_rate", "Pass rate in training", True),
    ("tool_calls", "Tool calls a rollout", False),
    ("malformed_rate", "Malformed calls", True),
)
STALENESS = (("sample/staleness_mean", "mean"), ("sample/staleness_max", "largest"))
TIMES = (
    ("perf/step_s", "a whole update"),
    ("perf/rollout_wait_s", "of it waiting for rollouts"),
    ("perf/update_s", "training"),
)


def harnesses(metrics: Metrics) -> list[str]:
    """The harnesses that have a reward of their own in some entry."""
    return sorted({key.removesuffix("/reward") for entry in metrics for key in entry if key.endswith("/reward")})


def learning_charts(metrics: Metrics) -> list[Chart]:
    """Reward, pass rate, tool calls and malformed calls, a line a harness."""
    names = harnesses(metrics)
    return [
        Chart(title, [series(metrics, f"{name}/{metric}", name, color) for color, name in enumerate(names)], percent)
        for metric, title, percent in LEARNING
    ]


def staleness_charts(metrics: Metrics) -> list[Chart]:
    """How old the weights were that sampled what an update trains on."""
    lines = [series(metrics, metric, name, color) for color, (metric, name) in enumerate(STALENESS)]
    return [Chart("Staleness, updates", lines, top=1.0)]


def throughput_charts(metrics: Metrics) -> list[Chart]:
    """Trained tokens a second of wall time, and where the time of an update goes."""
    speed = series(metrics, "perf/trained_tok_s_wall_clock", "all nodes", 0)
    times = [series(metrics, metric, name, color) for color, (metric, name) in enumerate(TIMES)]
    return [Chart("Trained tokens a second", [speed]), Chart("Seconds an update", times)]


def trend_charts(results: Mapping[str, Any]) -> tuple[list[Chart], list[tuple[str, str]]]:
    """Held-out pass@1 of every evaluated set of weights, with a sentence for each line that has three or more."""
    evaluations = list(_evaluations(results))
    names = sorted({name for _, part in evaluations for name in part["harnesses"]})
    parts: dict[str, list[tuple[float, Mapping[str, Any]]]] = {
        name: [(update, part["harnesses"][name]) for update, part in evaluations if name in part["harnesses"]]
        for name in names
    }
    if len(names) > 1:
        parts[ALL] = evaluations
    lines, sentences = [], []
    for color, (name, own) in enumerate(parts.items()):
        line, found = _trend_line(name, color, own)
        lines.append(line)
        sentences += [(name, found.sentence())] if found else []
    shown = any(len(line.points) > 2 for line in lines)
    note = "Bars: 95% interval of each evaluation. Band: where the line lies, with 95%."
    note += " Left out: what lacks grades or is of other tasks."
    return ([Chart("Held-out pass@1", lines, percent=True, note=note)] if shown else []), sentences


def _evaluations(results: Mapping[str, Any]) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """(update, figures) of each whole evaluation whose weights' update is known, by update; of the tasks that
    most of them are of.
    """
    known = [(0, results["before"]), (results["updates"], results["after"])]
    known += [(entry["update"], entry) for entry in results["checkpoints"]]
    whole = [(update, part) for update, part in known if update is not None and _is_whole(part)]
    often = Counter(map(_tasks, (part for _, part in whole)))
    chosen = often.most_common(1)[0][0] if often else None
    yield from sorted(((update, part) for update, part in whole if _tasks(part) == chosen), key=lambda pair: pair[0])


def _tasks(part: Mapping[str, Any]) -> tuple[Any, Any]:
    """What an evaluation is of: hashes of its tasks and of their graders."""
    return part.get("cohort"), part.get("graders")


def _is_whole(part: Mapping[str, Any] | None) -> bool:
    return part is not None and part["pass@1"] is not None and not part.get("provisional")


def _trend_line(name: str, color: int, own: Sequence[tuple[float, Mapping[str, Any]]]) -> tuple[Series, Trend | None]:
    graded = [(update, part) for update, part in own if part["pass@1"] is not None]
    points: list[Point] = [(update, part["pass@1"]) for update, part in graded]
    sizes = [part.get("n", part.get("graded")) for _, part in graded]
    passed = [round(rate * n) for (_, rate), n in zip(points, sizes, strict=True)]
    found = trend([x for x, _ in points], passed, sizes)
    intervals = [tuple(part["interval"]) for _, part in graded]
    return Series(name, color, points, intervals, found.band if found else ()), found


def series(metrics: Metrics, metric: str, name: str, color: int) -> Series:
    """The line of one metric, over the updates that have it."""
    return Series(name, color, [(entry["update"], entry[metric]) for entry in metrics if metric in entry])

"""The closing table of a run, for a terminal (rich) and for a README (Markdown), from the contents of results.json."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

ALL = "all"
HEADINGS = ("harness", "pass@1 before", "pass@1 after", "change, points", "tool calls", "malformed")
CHECKPOINT_TITLE = "Checkpoints, on the held-out tasks"
MEASURE_TITLE = "How rollouts ended"
LEVEL_TITLE = "By difficulty"
RATES = {"cut": "truncation_rate", "own end": "submission_rate", "time-out": "timeout_rate"}
LEVEL_HEADINGS = ("evaluation", "harness", "difficulty", "pass@1", "95%", "n")
CHECKPOINT_HEADINGS = ("checkpoint", "harness", "update", "pass@1", "95%", "graded")
NOTHING = "–"
NARROW: dict[str, Any] = {"padding": (0, 1), "collapse_padding": True, "pad_edge": False}

Results = Mapping[str, Any]


def table_rows(results: Results) -> Iterator[tuple[str, ...]]:
    """One row of cells a harness; with several, one over all of them. A line end parts a value from its detail."""
    sides = [results["before"], results["after"]]
    harnesses = sorted({name for side in sides if side for name in side["harnesses"]})
    for harness in harnesses:
        before, after, change = (_part(results[key], harness) for key in ("before", "after", "difference"))
        yield _row(harness, before, after, change)
    if len(harnesses) > 1:
        yield _row(ALL, results["before"], results["after"], results["difference"])


def closing_sentence(results: Results) -> str:
    """The change in one sentence, what speaks against trusting it, and a warning when rollouts are missing."""
    text = f"{_headline(results)}."
    text += _log_sentence(results["after"] or results["before"])
    for harness, reason in results["set_aside"].items():
        text += f" {harness} was set aside during training: {reason}."
    return text + (f" Provisional: {_missing(results)}." if results["provisional"] else "")


def _headline(results: Results) -> str:
    """The change, or why there is none to tell."""
    change, differs = results["difference"], "; ".join(results.get("differs", ()))
    if change:
        return f"Held-out pass@1: {change['sentence']}" + (f". Not like with like: {differs}" if differs else "")
    if not (results["before"] and results["after"]):
        return "Held-out pass@1 was not measured both before and after"
    if results["provisional"]:
        return "The change in pass@1 is not told before every rollout is graded"
    return f"The two evaluations cannot be compared: {differs}"


def _missing(results: Results) -> str:
    sides = {name: results[name] for name in ("before", "after") if results[name]}
    parts = [f"{name} {side['n']:,} of {side['planned']:,}" for name, side in sides.items()]
    return f"rollouts graded: {', '.join(parts)}; the same command tries the others again"


def comparison_sentences(results: Results) -> Iterator[tuple[str, str]]:
    """(harness, what changed in it), and all harnesses together where there are several."""
    return change_sentences(results["difference"])


def change_sentences(change: Results | None) -> Iterator[tuple[str, str]]:
    """The same for any difference: pass@1, what was won and lost, tool calls; and what speaks against comparing."""
    if change is None:
        return
    parts = dict(change["harnesses"])
    if len(parts) > 1:
        parts[ALL] = change
    for name, part in parts.items():
        more = [part[key]["sentence"] for key in ("flips", "savings") if key in part]  # older results have no flips
        yield name, "; ".join((part["sentence"], *more)) + "."


def against_sentences(found: Results) -> Iterator[tuple[str, str]]:
    """(harness, what one run does otherwise than another), or why that is not told."""
    yield from change_sentences(found["difference"])
    differs = "; ".join(found["differs"])
    if found["difference"]:
        if differs:
            yield ALL, f"not like with like: {differs}."
    elif found["provisional"]:
        yield ALL, "not told before every rollout of both is graded."
    elif differs:
        yield ALL, f"they cannot be compared: {differs}."


def _log_sentence(side: Results | None) -> str:
    """How often a harness's own log contradicts the trace, for those that have one."""
    shares = {name: own["tool_log_difference"] for name, own in (side or {"harnesses": {}})["harnesses"].items()}
    known = [f"{name} {share:.1%}" for name, share in sorted(shares.items()) if share is not None]
    return f" Rollouts whose tool calls differ from the harness's own log: {', '.join(known)}." if known else ""


def rich_table(results: Results) -> Table:
    """The table for a terminal of 80 columns or more."""
    table = Table(title="Held-out tasks, before and after training", title_justify="left", box=SIMPLE_HEAD, **NARROW)
    for heading in HEADINGS:
        justify: Literal["left", "right"] = "left" if heading == HEADINGS[0] else "right"
        table.add_column(heading.replace(" ", "\n"), justify=justify, no_wrap=True)
    for cells in table_rows(results):
        table.add_row(*cells, style="bold" if cells[0] == ALL else None)
    return table


def markdown_table(results: Results) -> str:
    """The tables and the sentences as Markdown."""
    text = f"{_markdown(HEADINGS, table_rows(results), 1)}\n\n{closing_sentence(results)}\n"
    text += "".join(f"\n- {name}: {sentence}" for name, sentence in comparison_sentences(results)).rstrip() + "\n"
    for _, headings, rows, names in _more_tables(results):
        text += f"\n{_markdown(headings, rows, names)}\n"
    return text + "".join(f"\n{sentence}\n" for sentence in retry_sentences(results))


def _more_tables(results: Results) -> Iterator[tuple[str, Sequence[str], list[tuple[str, ...]], int]]:
    """(title, headings, rows, how many columns are text) of every further table that has a row."""
    measured = measure_headings(results)
    for title, headings, rows, names in (
        (CHECKPOINT_TITLE, CHECKPOINT_HEADINGS, checkpoint_rows(results), 2),
        (MEASURE_TITLE, measured, measure_rows(results, measured), 2),
        (LEVEL_TITLE, LEVEL_HEADINGS, level_rows(results), 3),
    ):
        if found := list(rows):
            yield title, headings, found, names


def _evaluations(results: Results) -> Iterator[tuple[str, str, Results]]:
    """(evaluation, harness or ALL, its figures) of everything that was evaluated and has a graded rollout."""
    sides = {name: results[name] for name in ("before", "after") if results[name]}
    for label, side in (*sides.items(), *((entry["label"], entry) for entry in results["checkpoints"])):
        parts = dict(side["harnesses"]) | ({ALL: side} if len(side["harnesses"]) > 1 else {})
        yield from ((label, name, part) for name, part in parts.items() if part["n"])


def measure_headings(results: Results) -> tuple[str, ...]:
    """With a column for each k of pass@k beyond 1 that some evaluation has."""
    ks = sorted({int(k) for _, _, part in _evaluations(results) for k in part["pass@k"]} - {1})
    return ("evaluation", "harness", *(f"pass@{k}" for k in ks), *RATES, "calls")


def measure_rows(results: Results, headings: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """pass@k, how rollouts ended and model calls a rollout: one row a (evaluation, harness)."""
    ks = [heading.removeprefix("pass@") for heading in headings if heading.startswith("pass@")]
    for label, name, part in _evaluations(results):
        several = [_share(part["pass@k"].get(k)) for k in ks]
        yield label, name, *several, *(_share(part[key]) for key in RATES.values()), _number(part, "calls")


def level_rows(results: Results) -> Iterator[tuple[str, ...]]:
    """pass@1 by the difficulty that tasks say of themselves: one row a (evaluation, harness, level)."""
    for label, name, part in _evaluations(results):
        for level, own in part["difficulty"].items():
            lo, hi = own["interval"]
            yield label, name, level, _share(own["pass@1"]), f"{100 * lo:.0f} to {100 * hi:.0f}", str(own["n"])


def retry_sentences(results: Results) -> Iterator[str]:
    """What was tried again in each evaluation, and why."""
    for label, counted in results.get("retries", {}).items():
        if causes := ", ".join(f"{cause} {count:,}" for cause, count in counted["causes"].items()):
            yield f"{label}: rollouts tried more than once {counted['rollouts']:,}; tries without a grade: {causes}."


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.1f}%"


def _markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], names: int) -> str:
    """``names``: how many columns are text, left-aligned."""
    rule = ["---"] * names + ["---:"] * (len(headings) - names)
    return "\n".join("| " + " | ".join(cells).replace("\n", " ") + " |" for cells in (headings, rule, *rows))


def checkpoint_parts(results: Results) -> Iterator[tuple[Results, str, Results, str]]:
    """(evaluation, harness, its figures, update) of every evaluation of a checkpoint; with several harnesses, one over
    all of them comes last.
    """
    for entry in results["checkpoints"]:
        parts = dict(entry["harnesses"])
        if len(parts) > 1:
            parts[ALL] = entry
        update = NOTHING if entry["update"] is None else str(entry["update"])
        for harness, part in parts.items():
            yield entry, harness, part, update


def checkpoint_rows(results: Results) -> Iterator[tuple[str, ...]]:
    """One row a (checkpoint, harness); with several harnesses, one over all of them."""
    for entry, harness, part, update in checkpoint_parts(results):
        yield entry["label"], harness, update, *_graded_rate(part), f"{part['graded']}/{part['planned']}"


def _graded_rate(part: Results) -> tuple[str, str]:
    if part["interval"] is None:
        return NOTHING, NOTHING
    lo, hi = part["interval"]
    return f"{100 * part['pass@1']:.1f}%", f"{100 * lo:.0f} to {100 * hi:.0f}"


def _rich(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], names: int) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, **NARROW)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < names else "right", no_wrap=True)
    for cells in rows:
        table.add_row(*cells, style="bold" if cells[1] == ALL else None)
    return table


def print_results(results: Results, console: Console | None = None) -> None:
    """Show the tables, the sentences and what the run took."""
    console = console or Console()
    console.print(rich_table(results))
    console.print(closing_sentence(results), highlight=False)
    for parts in _more_tables(results):
        console.print(_rich(*parts))
    for sentence in retry_sentences(results):
        console.print(sentence, highlight=False)
    console.print(_effort(results), highlight=False, style="dim")


def _row(name: str, before: Results | None, after: Results | None, change: Results | None) -> tuple[str, ...]:
    return (
        name,
        rate(before),
        rate(after),
        change_points(change),
        f"{_number(before, 'tool_calls')}\n→ {_number(after, 'tool_calls')}",
        f"{_percent(before, 'malformed_rate')}\n→ {_percent(after, 'malformed_rate')}",
    )


def _part(side: Results | None, harness: str) -> Results | None:
    return side["harnesses"].get(harness) if side else None


def rate(side: Results | None) -> str:
    """pass@1 of an evaluation, with its 95% interval below it."""
    if side is None:
        return NOTHING
    lo, hi = side["interval"]
    return f"{100 * side['pass@1']:.1f}% of {side['n']}\n({100 * lo:.0f} to {100 * hi:.0f})"


def change_points(change: Results | None) -> str:
    """The difference between two evaluations in points, with its 95% interval below it."""
    if change is None or change["pass@1"] is None:
        return NOTHING
    lo, hi = change["interval"]
    interval = f"{100 * lo:+.1f} to {100 * hi:+.1f}" if lo < hi else "no interval"
    return f"{100 * change['pass@1']:+.1f}\n({interval})"


def _number(side: Results | None, key: str) -> str:
    return NOTHING if side is None or side[key] is None else f"{side[key]:.2f}"


def _percent(side: Results | None, key: str) -> str:
    return NOTHING if side is None or side[key] is None else f"{100 * side[key]:.1f}%"


def _effort(results: Results) -> str:
    size = f"{results['updates']} updates, {results['rollouts']} training rollouts"
    return f"{size}, {results['wall_s']['total'] / 60:.1f} minutes, seed {results['seed']}."

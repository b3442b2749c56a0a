"""The closing table of a run, for a terminal (rich) and for a README (Markdown), from the contents of results.json."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

ALL = "all"
HEADINGS = ("harness", "pass@1 before", "pass@1 after", "change, points", "tool calls", "malformed")
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
    """The same for any difference: pass@1, what was won and lost, tool calls."""
    parts = dict(change["harnesses"]) if change else {}
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
    """The tables and the sentence as Markdown."""
    text = f"{_markdown(HEADINGS, table_rows(results), 1)}\n\n{closing_sentence(results)}\n"
    text += "".join(f"\n- {name}: {sentence}" for name, sentence in comparison_sentences(results)).rstrip() + "\n"
    if not results["checkpoints"]:
        return text
    return f"{text}\n{_markdown(CHECKPOINT_HEADINGS, checkpoint_rows(results), 2)}\n"


def _markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], names: int) -> str:
    """``names``: how many columns are text, left-aligned."""
    rule = ["---"] * names + ["---:"] * (len(headings) - names)
    return "\n".join("| " + " | ".join(cells).replace("\n", " ") + " |" for cells in (headings, rule, *rows))


def checkpoint_rows(results: Results) -> Iterator[tuple[str, ...]]:
    """One row a (checkpoint, harness); with several harnesses, one over all of them."""
    for entry in results["checkpoints"]:
        parts = dict(entry["harnesses"])
        if len(parts) > 1:
            parts[ALL] = entry
        for harness, part in parts.items():
            update = NOTHING if entry["update"] is None else str(entry["update"])
            yield entry["label"], harness, update, *_graded_rate(part), f"{part['graded']}/{part['planned']}"


def _graded_rate(part: Results) -> tuple[str, str]:
    if part["interval"] is None:
        return NOTHING, NOTHING
    lo, hi = part["interval"]
    return f"{100 * part['pass@1']:.1f}%", f"{100 * lo:.0f} to {100 * hi:.0f}"


def checkpoint_table(results: Results) -> Table:
    """The evaluations of checkpoints for a terminal."""
    table = Table(title="Checkpoints, on the held-out tasks", title_justify="left", box=SIMPLE_HEAD, **NARROW)
    for number, heading in enumerate(CHECKPOINT_HEADINGS):
        table.add_column(heading, justify="left" if number < 2 else "right", no_wrap=True)
    for cells in checkpoint_rows(results):
        table.add_row(*cells, style="bold" if cells[1] == ALL else None)
    return table


def print_results(results: Results, console: Console | None = None) -> None:
    """Show the table, the sentence and what the run took."""
    console = console or Console()
    console.print(rich_table(results))
    console.print(closing_sentence(results), highlight=False)
    if results["checkpoints"]:
        console.print(checkpoint_table(results))
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
    if change is None:
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

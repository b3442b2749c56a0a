"""report/index.html: one page that needs nothing else, of one run or of several side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from pipeline.report import difficulty_table
from pipeline.report.curves import learning_charts, staleness_charts, throughput_charts, trend_charts
from pipeline.report.evaluation_tables import CHECKPOINTS, checkpoints, remarks
from pipeline.report.markup import Book, document, scrolled, sentence_list, table
from pipeline.report.rollout_view import TRAINING
from pipeline.report.shares import SHARES, harness_shares
from pipeline.report.store import write_text
from pipeline.report.table import (
    ALL,
    HEADINGS,
    LEVEL_HEADINGS,
    LEVEL_TITLE,
    MEASURE_TITLE,
    closing_sentence,
    comparison_sentences,
    level_rows,
    measure_headings,
    measure_rows,
    retry_sentences,
    table_rows,
)

BINS = ("over 95%", "70–95%", "40–70%", "10–40%", "1–10%", "under 1%")  # of probability; the script has the same


@dataclass(frozen=True)
class PageRun:
    """What the page shows of one run.

    ``outcomes[harness][outcome]`` and ``causes`` (harness, cause, how often) count all kept training rollouts;
    ``rollouts`` are the views of a sample of the ``kept`` ones, and of some of the evaluations'; ``comparisons`` are
    sentences against the first run; ``difficulty`` is what difficulty.json holds, None without one.
    """

    name: str
    facts: Sequence[tuple[str, str]]
    results: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    outcomes: Mapping[str, Mapping[str, int]]
    causes: Sequence[tuple[str, str, int]]
    groups: Mapping[str, int]
    rollouts: Sequence[Mapping[str, Any]]
    kept: int
    comparisons: Sequence[tuple[str, str]] = ()
    difficulty: Mapping[str, Any] | None = None


def write_page(path: Path, runs: Sequence[PageRun]) -> None:
    """Publish the page."""
    write_text(path, page(runs))


def page(runs: Sequence[PageRun]) -> str:
    """The whole page as text."""
    book = Book(several=len(runs) > 1)
    shown = [(anchor, title, render(runs, book)) for anchor, title, render in SECTIONS]
    return document("Yoke: " + " and ".join(run.name for run in runs), shown, book, _rollouts(runs))


Panel = Callable[[PageRun, Book], str]


def _panels(panel: Panel) -> Callable[[Sequence[PageRun], Book], str]:
    """A section of one panel a run, side by side where there are several; '' when no panel has anything."""

    def section(runs: Sequence[PageRun], book: Book) -> str:
        if not book.several:
            return panel(runs[0], book)
        parts = [(run.name, panel(run, book)) for run in runs]
        if not any(body for _, body in parts):
            return ""
        shown = (f"<div><h3>{escape(name)}</h3>{body or '<p>Not known.</p>'}</div>" for name, body in parts)
        return f'<div class="panels">{"".join(shown)}</div>'

    return section


def _facts(run: PageRun, _: Book) -> str:
    rows = (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in run.facts)
    return f"<dl>{''.join(rows)}</dl>"


def _comparison(runs: Sequence[PageRun], book: Book) -> str:
    if not book.several:
        return ""
    lines = [(f"{run.name} against {runs[0].name}, {name}", text) for run in runs for name, text in run.comparisons]
    nothing = f"<p>No task was evaluated in {escape(runs[0].name)} and in another of these runs.</p>"
    return sentence_list(lines) or nothing


def _before_after(run: PageRun, _: Book) -> str:
    results = run.results
    parts = dict(results["difference"]["harnesses"], **{ALL: results["difference"]}) if results["difference"] else {}
    rows = [(*cells, _saved(parts.get(cells[0]))) for cells in table_rows(results)]
    if not rows:
        return "<p>Nothing was evaluated before or after training.</p>"
    shown = table("Held-out tasks; below each figure its 95% interval", (*HEADINGS, "calls saved, both solved"), rows)
    return f"{shown}<p>{escape(closing_sentence(results))}</p>{sentence_list(comparison_sentences(results))}"


def _saved(part: Mapping[str, Any] | None) -> str:
    if part is None or part["savings"]["percent"] is None:
        return "–"
    return f"{part['savings']['percent']:.1f}%\n(n = {part['savings']['n']:,})"


def _curves(run: PageRun, book: Book) -> str:
    return book.figures(learning_charts(run.metrics))


def _trend(run: PageRun, book: Book) -> str:
    charts, sentences = trend_charts(run.results)
    return book.figures(charts) + sentence_list(sentences)


def _evaluations(run: PageRun, _: Book) -> str:
    results = run.results
    measured = measure_headings(results)
    tables = (
        ("Checkpoints and other models", CHECKPOINTS, list(checkpoints(results))),
        (MEASURE_TITLE, measured, list(measure_rows(results, measured))),
        (LEVEL_TITLE, LEVEL_HEADINGS, list(level_rows(results))),
    )
    shown = "".join(table(title, headings, rows) for title, headings, rows in tables if rows)
    tried = "".join(f"<p>{escape(sentence)}</p>" for sentence in retry_sentences(results))
    return shown + sentence_list(remarks(results)) + tried


def _shares(run: PageRun, _: Book) -> str:
    shares = harness_shares(run.metrics)
    if not shares:
        return ""
    cells = "".join(
        f'<tr><th scope="row">{escape(harness)}</th>{"".join(_share(own.get(name)) for name in SHARES)}</tr>'
        for harness, own in shares.items()
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("harness", *SHARES))
    caption = "Each harness's part in what was trained, over all updates"
    return scrolled(
        caption, f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{cells}</tbody></table>"
    )


def _share(value: float | None) -> str:
    if value is None:
        return "<td>–</td>"
    return f'<td>{100 * value:.1f}%<span class="share" style="--w:{100 * value:.1f}%"></span></td>'


def _pace(run: PageRun, book: Book) -> str:
    return book.figures([*staleness_charts(run.metrics), *throughput_charts(run.metrics)])


def _failures(run: PageRun, _: Book) -> str:
    kinds = sorted({kind for own in run.outcomes.values() for kind in own})
    if not kinds:
        return ""
    rows = [
        (harness, *(_count(own.get(kind, 0), sum(own.values())) for kind in kinds))
        for harness, own in run.outcomes.items()
    ]
    shown = table("How training rollouts ended", ("harness", *(kind.replace("_", " ") for kind in kinds)), rows)
    causes = [(harness, f"{cause} ({count:,})") for harness, cause, count in run.causes]
    groups = ", ".join(f"{count:,} {name}" for name, count in run.groups.items())
    return shown + sentence_list(causes) + (f"<p>Groups: {groups}.</p>" if groups else "")


def _count(count: int, whole: int) -> str:
    return f"{count:,}\n({100 * count / whole:.1f}%)" if count else "0"


def _difficulty(run: PageRun, _: Book) -> str:
    if run.difficulty is None or not run.difficulty["tasks"]:
        return ""
    shown = table("Training tasks, by harness", difficulty_table.HEADINGS, difficulty_table.rows(run.difficulty))
    return f"{shown}<p>{escape(difficulty_table.sentence(run.difficulty))}</p>"


def _viewer(runs: Sequence[PageRun], _: Book) -> str:
    shown = Counter(rollout["stage"] for run in runs for rollout in run.rollouts)
    if not shown:
        return ""
    swatches = " ".join(f'<span class="swatch p{place}">{text}</span>' for place, text in enumerate(BINS))
    kept = f"{shown[TRAINING]:,} of {sum(run.kept for run in runs):,} kept training rollouts are on this page"
    evaluated = ", ".join(f"{count:,} from {stage}" for stage, count in shown.items() if stage != TRAINING)
    paired = f" Of the held-out tasks there are {evaluated}." if evaluated else ""
    return f"""<p>{kept}, chosen evenly over harnesses and outcomes, newest first.{paired}</p>
<div class="controls"><label for="which">Rollout</label> <select id="which"></select>
<button type="button" id="previous">Previous</button> <button type="button" id="next">Next</button></div>
<p class="soft">Colour of a sampled token, by the probability that it was sampled with: {swatches}</p>
<div id="rollout" aria-live="polite"></div>
<noscript><p>The viewer needs JavaScript.</p></noscript>"""


SECTIONS: tuple[tuple[str, str, Callable[[Sequence[PageRun], Book], str]], ...] = (
    ("run", "The run", _panels(_facts)),
    ("comparison", "Comparison", _comparison),
    ("before-after", "Before and after", _panels(_before_after)),
    ("curves", "Training curves", _panels(_curves)),
    ("trend", "Checkpoints", _panels(_trend)),
    ("evaluations", "The evaluations", _panels(_evaluations)),
    ("shares", "Shares by harness", _panels(_shares)),
    ("pace", "Staleness and throughput", _panels(_pace)),
    ("failures", "How rollouts ended", _panels(_failures)),
    ("difficulty", "How hard the tasks were", _panels(_difficulty)),
    ("rollouts", "Rollouts", _viewer),
)


def _rollouts(runs: Sequence[PageRun]) -> list[dict[str, Any]]:
    several = len(runs) > 1
    return [{**rollout, "run": f"{run.name} · " if several else ""} for run in runs for rollout in run.rollouts]

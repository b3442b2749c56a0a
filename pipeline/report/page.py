"""report/index.html: one page that needs nothing else, of one run or of several side by side.

Every text from a run goes through `escape` or into the JSON that the page's script shows as text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from pipeline.report import difficulty_table
from pipeline.report.curves import learning_charts, staleness_charts, throughput_charts, trend_charts
from pipeline.report.shares import SHARES, harness_shares
from pipeline.report.store import write_text
from pipeline.report.svg import Chart
from pipeline.report.table import ALL, HEADINGS, closing_sentence, comparison_sentences, table_rows

ASSETS = Path(__file__).parent / "assets"
BINS = ("over 95%", "70–95%", "40–70%", "10–40%", "1–10%", "under 1%")  # of probability; the script has the same


@dataclass(frozen=True)
class PageRun:
    """What the page shows of one run.

    ``outcomes[harness][outcome]`` and ``causes`` (harness, cause, how often) count all kept training rollouts;
    ``rollouts`` are the views of a sample of ``kept`` ones; ``comparisons`` are sentences against the first run;
    ``difficulty`` is what difficulty.json holds, None without one.
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
    book = _Book(several=len(runs) > 1)
    shown = [(anchor, title, render(runs, book)) for anchor, title, render in SECTIONS]
    kept = [(anchor, title, body) for anchor, title, body in shown if body]
    asset = {name: (ASSETS / f"page.{kind}").read_text() for name, kind in (("style", "css"), ("script", "js"))}
    return Template((ASSETS / "page.html").read_text()).substitute(
        asset,
        title=escape("Yoke: " + " and ".join(run.name for run in runs)),
        nav="\n".join(f'<li><a href="#{anchor}">{title}</a></li>' for anchor, title, _ in kept),
        body="\n".join(f'<section aria-labelledby="{a}"><h2 id="{a}">{t}</h2>\n{b}\n</section>' for a, t, b in kept),
        data=embedded({"charts": [chart.data() for chart in book.charts], "rollouts": _rollouts(runs)}),
    )


def embedded(value: Any) -> str:
    """JSON that no HTML parser mistakes for an end of its script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.translate({ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026", 0x2028: "\\u2028"})


@dataclass
class _Book:
    """Numbers the charts in the order in which they stand on the page."""

    several: bool
    charts: list[Chart]

    def __init__(self, several: bool) -> None:
        self.several, self.charts = several, []

    def figures(self, charts: Iterable[Chart]) -> str:
        """A grid of charts, '' when none has a point."""
        kept = [chart for chart in charts if chart.kept]
        self.charts += kept
        return f'<div class="grid">{"".join(map(_figure, kept))}</div>' if kept else ""


Panel = Callable[[PageRun, _Book], str]


def _panels(panel: Panel) -> Callable[[Sequence[PageRun], _Book], str]:
    """A section of one panel a run, side by side where there are several; '' when no panel has anything."""

    def section(runs: Sequence[PageRun], book: _Book) -> str:
        if not book.several:
            return panel(runs[0], book)
        parts = [(run.name, panel(run, book)) for run in runs]
        if not any(body for _, body in parts):
            return ""
        shown = (f"<div><h3>{escape(name)}</h3>{body or '<p>Not known.</p>'}</div>" for name, body in parts)
        return f'<div class="panels">{"".join(shown)}</div>'

    return section


def _facts(run: PageRun, _: _Book) -> str:
    rows = (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in run.facts)
    return f"<dl>{''.join(rows)}</dl>"


def _comparison(runs: Sequence[PageRun], book: _Book) -> str:
    if not book.several:
        return ""
    lines = [(f"{run.name} against {runs[0].name}, {name}", text) for run in runs for name, text in run.comparisons]
    return _sentences(lines) or f"<p>No task was evaluated in {escape(runs[0].name)} and in another of these runs.</p>"


def _before_after(run: PageRun, _: _Book) -> str:
    results = run.results
    parts = dict(results["difference"]["harnesses"], **{ALL: results["difference"]}) if results["difference"] else {}
    rows = [(*cells, _saved(parts.get(cells[0]))) for cells in table_rows(results)]
    if not rows:
        return "<p>Nothing was evaluated before or after training.</p>"
    shown = table("Held-out tasks; below each figure its 95% interval", (*HEADINGS, "calls saved, both solved"), rows)
    return f"{shown}<p>{escape(closing_sentence(results))}</p>{_sentences(comparison_sentences(results))}"


def _saved(part: Mapping[str, Any] | None) -> str:
    if part is None or part["savings"]["percent"] is None:
        return "–"
    return f"{part['savings']['percent']:.1f}%\n(n = {part['savings']['n']:,})"


def _curves(run: PageRun, book: _Book) -> str:
    return book.figures(learning_charts(run.metrics))


def _trend(run: PageRun, book: _Book) -> str:
    charts, sentences = trend_charts(run.results)
    return book.figures(charts) + _sentences(sentences)


def _shares(run: PageRun, _: _Book) -> str:
    shares = harness_shares(run.metrics)
    if not shares:
        return ""
    cells = "".join(
        f'<tr><th scope="row">{escape(harness)}</th>{"".join(_share(own.get(name)) for name in SHARES)}</tr>'
        for harness, own in shares.items()
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("harness", *SHARES))
    caption = "Each harness's part in what was trained, over all updates"
    return _scrolled(
        caption, f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{cells}</tbody></table>"
    )


def _share(value: float | None) -> str:
    if value is None:
        return "<td>–</td>"
    return f'<td>{100 * value:.1f}%<span class="share" style="--w:{100 * value:.1f}%"></span></td>'


def _pace(run: PageRun, book: _Book) -> str:
    return book.figures([*staleness_charts(run.metrics), *throughput_charts(run.metrics)])


def _failures(run: PageRun, _: _Book) -> str:
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
    return shown + _sentences(causes) + (f"<p>Groups: {groups}.</p>" if groups else "")


def _count(count: int, whole: int) -> str:
    return f"{count:,}\n({100 * count / whole:.1f}%)" if count else "0"


def _difficulty(run: PageRun, _: _Book) -> str:
    if run.difficulty is None or not run.difficulty["tasks"]:
        return ""
    shown = table("Training tasks, by harness", difficulty_table.HEADINGS, difficulty_table.rows(run.difficulty))
    return f"{shown}<p>{escape(difficulty_table.sentence(run.difficulty))}</p>"


def _viewer(runs: Sequence[PageRun], _: _Book) -> str:
    shown = sum(len(run.rollouts) for run in runs)
    if not shown:
        return ""
    swatches = " ".join(f'<span class="swatch p{place}">{text}</span>' for place, text in enumerate(BINS))
    kept = f"{shown:,} of {sum(run.kept for run in runs):,} kept rollouts are on this page"
    return f"""<p>{kept}, chosen evenly over harnesses and outcomes, newest first.</p>
<div class="controls"><label for="which">Rollout</label> <select id="which"></select>
<button type="button" id="previous">Previous</button> <button type="button" id="next">Next</button></div>
<p class="soft">Colour of a sampled token, by the probability that it was sampled with: {swatches}</p>
<div id="rollout" aria-live="polite"></div>
<noscript><p>The viewer needs JavaScript.</p></noscript>"""


SECTIONS: tuple[tuple[str, str, Callable[[Sequence[PageRun], _Book], str]], ...] = (
    ("run", "The run", _panels(_facts)),
    ("comparison", "Comparison", _comparison),
    ("before-after", "Before and after", _panels(_before_after)),
    ("curves", "Training curves", _panels(_curves)),
    ("trend", "Checkpoints", _panels(_trend)),
    ("shares", "Shares by harness", _panels(_shares)),
    ("pace", "Staleness and throughput", _panels(_pace)),
    ("failures", "How rollouts ended", _panels(_failures)),
    ("difficulty", "How hard the tasks were", _panels(_difficulty)),
    ("rollouts", "Rollouts", _viewer),
)


def table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column names the row. A line end parts a value from its detail."""
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = "".join(
        f'<tr{" class=all" if name == ALL else ""}><th scope="row">{escape(name)}</th>{"".join(map(_cell, cells))}</tr>'
        for name, *cells in rows
    )
    return _scrolled(
        caption,
        f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>",
    )


def _cell(text: str) -> str:
    value, _, detail = text.partition("\n")
    return f"<td>{escape(value)}{f'<br><small>{escape(detail)}</small>' if detail else ''}</td>"


def _scrolled(label: str, content: str) -> str:
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label, quote=True)}">{content}</div>'


def _sentences(lines: Iterable[tuple[str, str]]) -> str:
    items = "".join(f"<li>{escape(name)}: {escape(text)}</li>" for name, text in lines)
    return f"<ul>{items}</ul>" if items else ""


def _figure(chart: Chart) -> str:
    legend = "".join(f'<li class="c{line.color % 10}"><span>{escape(line.name)}</span></li>' for line in chart.kept)
    note = f'<p class="soft">{escape(chart.note)}</p>' if chart.note else ""
    return (
        f'<figure class="chart"><h3>{escape(chart.title)}</h3>{chart.svg()}<ul class="legend">{legend}</ul>'
        f"<output></output>{note}<details><summary>Values as a table</summary></details></figure>"
    )


def _rollouts(runs: Sequence[PageRun]) -> list[dict[str, Any]]:
    several = len(runs) > 1
    return [{**rollout, "run": f"{run.name} · " if several else ""} for run in runs for rollout in run.rollouts]

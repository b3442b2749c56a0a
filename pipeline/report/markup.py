"""What the report's pages are made of: the document, tables, charts, lists of sentences.

Every text from a run goes through `escape` or into the JSON that the page's script shows as text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from pipeline.report.svg import Chart
from pipeline.report.table import ALL

ASSETS = Path(__file__).parent / "assets"

Section = tuple[str, str, str]  # anchor, title, body


def document(title: str, sections: Iterable[Section], book: Book, rollouts: Sequence[Mapping[str, Any]] = ()) -> str:
    """The whole page. Sections without a body are left out; ``book`` holds their charts."""
    kept = [(anchor, heading, body) for anchor, heading, body in sections if body]
    asset = {name: (ASSETS / f"page.{kind}").read_text() for name, kind in (("style", "css"), ("script", "js"))}
    return Template((ASSETS / "page.html").read_text()).substitute(
        asset,
        title=escape(title),
        nav="\n".join(f'<li><a href="#{anchor}">{heading}</a></li>' for anchor, heading, _ in kept),
        body="\n".join(f'<section aria-labelledby="{a}"><h2 id="{a}">{t}</h2>\n{b}\n</section>' for a, t, b in kept),
        data=embedded({"charts": [chart.data() for chart in book.charts], "rollouts": rollouts}),
    )


def embedded(value: Any) -> str:
    """JSON that no HTML parser mistakes for an end of its script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.translate({ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026", 0x2028: "\\u2028"})


@dataclass
class Book:
    """Keeps the charts in the order in which they stand on the page. ``several``: it is a page of several runs."""

    several: bool = False
    charts: list[Chart] = field(default_factory=list)

    def figures(self, charts: Iterable[Chart]) -> str:
        """A grid of charts, '' when none has a point."""
        kept = [chart for chart in charts if chart.kept]
        self.charts += kept
        return f'<div class="grid">{"".join(map(_figure, kept))}</div>' if kept else ""


def table(
    caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]], links: Mapping[str, str] | None = None
) -> str:
    """A table whose first column names the row. A line end parts a value from its detail.

    ``links``: where the names of rows lead.
    """
    named = {name: f'<a href="{escape(place, quote=True)}">{escape(name)}</a>' for name, place in (links or {}).items()}
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = "".join(
        f'<tr{" class=all" if name == ALL else ""}><th scope="row">{named.get(name) or escape(name)}</th>'
        f"{''.join(map(_cell, cells))}</tr>"
        for name, *cells in rows
    )
    return scrolled(
        caption,
        f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>",
    )


def _cell(text: str) -> str:
    value, _, detail = text.partition("\n")
    return f"<td>{escape(value)}{f'<br><small>{escape(detail)}</small>' if detail else ''}</td>"


def scrolled(label: str, content: str) -> str:
    """What is wider than a phone scrolls in itself, by keys too."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label, quote=True)}">{content}</div>'


def sentence_list(lines: Iterable[tuple[str, str]]) -> str:
    """A list of (what it is about, sentence); '' for none."""
    items = "".join(f"<li>{escape(name)}: {escape(text)}</li>" for name, text in lines)
    return f"<ul>{items}</ul>" if items else ""


def _figure(chart: Chart) -> str:
    legend = "".join(f'<li class="c{line.color % 10}"><span>{escape(line.name)}</span></li>' for line in chart.kept)
    note = f'<p class="soft">{escape(chart.note)}</p>' if chart.note else ""
    return (
        f'<figure class="chart"><h3>{escape(chart.title)}</h3>{chart.svg()}<ul class="legend">{legend}</ul>'
        f"<output></output>{note}<details><summary>Values as a table</summary></details></figure>"
    )

"""The report's page: whole, harmless whatever the agents wrote, and right in a real browser."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from browser import Page
from outline import outline
from page_runs import EVIL, page_run

from pipeline.report.markup import embedded
from pipeline.report.page import PageRun, page, write_page

HEADINGS = [
    *("The run", "Before and after", "Training curves", "Checkpoints", "The evaluations", "Shares by harness"),
    *("Staleness and throughput", "How rollouts ended", "How hard the tasks were", "Rollouts"),
]


def test_text_of_a_run_cannot_become_part_of_the_page() -> None:
    text = page([page_run()])
    found = outline(text)
    assert [tag for tag, _ in found.seen].count("script") == 2, "the data and the page's own"
    assert not [tag for tag, _ in found.seen if tag in ("img", "b")]
    assert "onerror" not in {name for _, attributes in found.seen for name in attributes}
    assert json.loads(found.scripts[0])["rollouts"][0]["task"] == EVIL


def test_what_is_embedded_holds_no_markup() -> None:
    value = {"text": EVIL + "<!-- & \u2028"}
    assert not set("<>&\u2028") & set(embedded(value))
    assert json.loads(embedded(value)) == value


def test_nothing_is_fetched() -> None:
    found = outline(page([page_run()]))
    links = [attributes[name] for _, attributes in found.seen for name in ("src", "href") if name in attributes]
    assert links and all(link is not None and link.startswith(("#", "data:")) for link in links)


def test_every_section_is_there_and_what_is_not_known_is_left_out() -> None:
    text = page([page_run()])
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", text) == HEADINGS
    empty = PageRun("empty", [("Model", "m")], _no_results(), [], {}, [], {}, [], 0)
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", page([empty])) == ["The run", "Before and after"]
    assert "Nothing was evaluated" in page([empty])


def _no_results() -> dict[str, Any]:
    return {"before": None, "after": None, "difference": None, "checkpoints": [], "updates": 0}


def test_tables_name_their_rows_and_columns() -> None:
    found = outline(page([page_run()]))
    heads = [attributes.get("scope") for tag, attributes in found.seen if tag == "th"]
    assert heads and set(heads) == {"row", "col"}
    assert [tag for tag, _ in found.seen].count("caption") == [tag for tag, _ in found.seen].count("table") == 6


def test_figures_and_sentences() -> None:
    text = page([page_run()])
    assert "pi: +40.0 points, 95% interval" in text and "n = 20 pairs" in text
    # Where both solved the task, 4 calls became 3: pi 4 rollouts, mini-swe-agent 6.
    assert "25.0% fewer tool calls (16 → 12) where both solved the task, n = 4." in text
    assert (
        "all: +30.0 points" in text and "25.0% fewer tool calls (40 → 30) where both solved the task, n = 10." in text
    )
    assert "Of 2 training tasks up to update 12, no rollout solved 1" in text
    assert "3 of 83 kept training rollouts are on this page" in text
    assert "1 from the evaluation before training, 1 from the evaluation after training." in text
    assert '<th scope="row">after</th><td>all</td><td>–</td><td>100.0%</td>' in text, "how rollouts ended"
    assert '<th scope="row">0001-000004-update-000006</th><td>pi</td><td>6</td><td>40.0% of 20' in text
    assert "points per 100 updates" in text and "over 3 evaluations" in text
    assert '50.0%<span class="share" style="--w:50.0%">' in text


def test_several_runs_stand_side_by_side() -> None:
    text = page([page_run("one"), page_run("two")])
    assert text.count("<h3>one</h3>") == text.count("<h3>two</h3>") == len(HEADINGS) - 1
    assert "two against one, pi" in text
    data = json.loads(outline(text).scripts[0])
    assert {rollout["run"] for rollout in data["rollouts"]} == {"one · ", "two · "}
    assert len(data["charts"]) == text.count('<figure class="chart">')


@pytest.fixture(scope="module")
def shown(chromium: Page, tmp_path_factory: pytest.TempPathFactory) -> tuple[Page, str]:
    """A browser, and the address of the page of a made-up run."""
    path = tmp_path_factory.mktemp("page") / "index.html"
    write_page(path, [page_run()])
    return chromium, path.as_uri()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, True), (320, False)])
def test_the_page_in_a_browser(shown: tuple[Page, str], width: int, dark: bool) -> None:
    opened, url = shown
    opened.requests.clear()
    opened.errors.clear()
    opened.open(url, width, dark)
    assert opened.value("document.documentElement.scrollWidth") <= width
    assert opened.value("document.title") == "Yoke: one"
    opened.point_at("figure.chart svg")
    assert opened.value("document.querySelector('figure.chart output').textContent").startswith("update ")
    opened.value("document.querySelectorAll('figure.chart details').forEach((e) => { e.open = true; })")
    opened.value("document.querySelectorAll('.call details').forEach((e) => { e.open = true; })")
    assert opened.value("document.documentElement.scrollWidth") <= width
    background = opened.value("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")
    assert opened.errors == []
    assert [asked for asked in opened.requests if not asked.startswith("data:")] == [url]


@pytest.mark.slow
def test_the_viewer_shows_calls_tokens_and_the_tree(shown: tuple[Page, str]) -> None:
    opened, url = shown
    opened.open(url, 1280)
    assert opened.value("document.querySelectorAll('#which option').length") == 5
    titles = opened.value("[...document.querySelectorAll('.call h4')].map((e) => e.textContent)")
    assert titles == [
        "Call 1: the main agent's first call",
        "Call 2: goes on after call 1",
        "Call 3: a fork after call 1",
        "Call 4: a new history: a sub-agent, or a history that the harness rewrote",
    ]
    assert opened.value("document.querySelectorAll('.tree li').length") == 5  # one holds the fork's list
    assert opened.value("document.querySelector('.tokens').textContent") == "<b>4</b> <b>5</b> <b>6</b> "
    opened.point_at(".tokens span:nth-child(2)")
    told = opened.value("document.querySelector('.call output').textContent")
    assert told.startswith('token 2 of 3: "<b>5</b> ", id 5, logprob -0.6 (54.9%), policy version 0.')
    opened.value("document.querySelector('.tokens').focus()")
    opened.press("ArrowRight")
    assert "id 6" in opened.value("document.querySelector('.call output').textContent")
    opened.value("document.getElementById('next').click()")
    assert opened.value("document.getElementById('which').selectedIndex") == 1
    assert opened.value("document.querySelector('#rollout h3').textContent").startswith(EVIL)
    assert opened.value("document.title") == "Yoke: one", "nothing of it ran"


@pytest.mark.slow
def test_a_link_leads_to_a_rollout_and_from_there_to_its_twin(shown: tuple[Page, str]) -> None:
    opened, url = shown
    opened.errors.clear()
    opened.open("about:blank", 360)  # else the same page would only move, and not load
    opened.open(f"{url}#rollout-before", 360)
    assert opened.value("document.activeElement.id") == "rollout-before"
    assert opened.value("document.querySelector('#rollout h3').textContent").endswith("the evaluation before training")
    link = "[...document.querySelectorAll('#rollout a')].find((e) => e.textContent.startsWith('The same in'))"
    assert opened.value(f"{link}.textContent") == "The same in the evaluation after training: solved"
    opened.value(f"{link}.click()")
    opened.wait_for("document.activeElement.id === 'rollout-after'")
    assert opened.value("document.querySelector('#which').selectedOptions[0].parentNode.label") == (
        "the evaluation after training, pi"
    )
    opened.value("location.hash = '#rollout-elsewhere'")
    opened.wait_for("document.querySelector('#rollout').textContent.includes('elsewhere is not among those')")
    assert opened.value("document.documentElement.scrollWidth") <= 360 and opened.errors == []


@pytest.mark.slow
def test_a_chart_is_read_by_keys(shown: tuple[Page, str]) -> None:
    opened, url = shown
    opened.open(url, 1280)
    opened.value("document.querySelector('figure.chart svg').focus()")
    said = "document.querySelector('figure.chart output').textContent"
    assert opened.value(said) == "update 12: mini-swe-agent 0.6 · pi 0.6"
    opened.press("ArrowLeft")
    assert opened.value(said) == "update 11: mini-swe-agent 0.55 · pi 0.55"
    opened.press("Home")
    assert opened.value(said) == "update 1: mini-swe-agent 0.05 · pi 0.05"

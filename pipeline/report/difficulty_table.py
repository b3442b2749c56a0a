"""Training tasks by how hard they have been, for a terminal, from the contents of difficulty.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

HEADINGS = ("harness", "groups", "pass rate", "mean reward", "no contrast", "abandoned")
NOTHING = "–"
Figures = Mapping[str, Any]


def print_difficulty(found: Figures, console: Console) -> None:
    """A row a harness, and a sentence about the tasks. Nothing while no group has ended."""
    if not found["tasks"]:
        return
    table = Table(title="Training tasks", title_justify="left", box=SIMPLE_HEAD)
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if number else "left")
    for cells in rows(found):
        table.add_row(*cells)
    console.print(table)
    console.print(sentence(found), highlight=False)


def rows(found: Figures) -> list[tuple[str, ...]]:
    """The cells under HEADINGS, a row a harness."""
    return [(harness, *_row(own)) for harness, own in found["harnesses"].items()]


def sentence(found: Figures) -> str:
    """How many tasks taught nothing so far, because no rollout or every rollout solved them."""
    rates = [own["pass_rate"] for own in found["tasks"].values()]
    never, always = sum(rate == 0.0 for rate in rates), sum(rate is not None and rate >= 1.0 for rate in rates)
    return (
        f"Of {len(rates)} training tasks up to update {found['update']}, no rollout solved {never} "
        f"and every rollout solved {always}."
    )


def _row(own: Figures) -> tuple[str, ...]:
    rate = NOTHING if own["pass_rate"] is None else f"{own['pass_rate']:.1%}"
    reward = NOTHING if own["mean_reward"] is None else f"{own['mean_reward']:.3f}"
    share = NOTHING if not own["groups"] else f"{own['no_contrast'] / own['groups']:.0%}"
    return str(own["groups"]), rate, reward, share, str(own["abandoned"])

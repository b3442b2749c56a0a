"""`yoke harness check` as it goes on: a table in a terminal, a line for each scene elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipeline.stages.harness_check_result import Result

WAITING, RUNNING, PASSED, FAILED = "·", "…", "✓", "✗"
STYLES = {PASSED: "green", FAILED: "bold red", RUNNING: "yellow", WAITING: "dim"}


class View:
    """``with View(harnesses, scenes) as view: view.tell(…)``. ``stream`` is stdout by default."""

    def __init__(self, harnesses: Sequence[str], scenes: Sequence[str], stream: TextIO | None = None) -> None:
        self._scenes = scenes
        self._cells = {harness: dict.fromkeys(scenes, WAITING) for harness in harnesses}
        self._console = Console(file=stream or sys.stdout, highlight=False)
        self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=4)
        self._is_live = self._console.is_terminal

    def __enter__(self) -> View:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live:
            self._live.stop()

    def say(self, line: str) -> None:
        """A line of its own."""
        self._console.print(Text(line), soft_wrap=True)

    def tell(self, harness: str, scene: str, result: Result | None) -> None:
        """A scene of a harness begins (None), or is done."""
        self._cells[harness][scene] = RUNNING if result is None else FAILED if result.failures else PASSED
        if result is not None and not self._is_live:
            self.say(f"{harness}: {scene}: {'FAILED' if result.failures else 'holds'}{_figures(result)}")

    def _table(self) -> Table:
        table = Table("harness", *self._scenes, box=None, padding=(0, 1, 0, 0), header_style="dim")
        for harness, cells in self._cells.items():
            table.add_row(
                harness, *(Text(cells[scene], STYLES[cells[scene]], justify="center") for scene in self._scenes)
            )
        return table


def _figures(result: Result) -> str:
    facts = result.facts
    if "calls" not in facts:
        return ""
    rows = f"{facts['rows']} row{'s' if facts['rows'] != 1 else ''}"
    return f" ({facts['outcome']}, {facts['calls']} calls, {rows}, {facts['wall_s']} s)"

"""How far a piece of countable work is: a bar in a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

TELL_EVERY_S = 10.0


class Bar:
    """``with Bar("collect", 96) as bar: bar.advance(1, "what was done last")``. Not enabled, it says nothing."""

    def __init__(self, name: str, total: int, enabled: bool = True, stream: TextIO | None = None) -> None:
        self._name, self._total, self._enabled = name, total, enabled
        self._console = Console(file=stream or sys.stdout, highlight=False)
        self._done = 0
        self._started = self._told = time.monotonic()
        columns = TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        self._progress = Progress(
            *columns,
            TextColumn("{task.description}"),
            console=self._console,
            transient=True,
            disable=not (enabled and self._console.is_terminal),
        )
        self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, by: int, text: str) -> None:
        """``by`` more are done; ``text`` is shown beside the number."""
        self._done += by
        self._progress.update(self._task, advance=by, description=escape(text))
        now = time.monotonic()
        due = now - self._told > TELL_EVERY_S or self._done >= self._total
        if self._enabled and due and not self._console.is_terminal:
            self._told = now
            line = f"{self._name}: {self._done} of {self._total}, {now - self._started:.0f} s, {text}"
            self._console.print(line, soft_wrap=True, markup=False)

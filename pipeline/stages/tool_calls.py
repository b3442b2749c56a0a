"""How many tool calls a rollout made: from the trace, and from the harness's own log to check it.

A log says what the harness did with the answers, and no two harnesses log the same of a call that was malformed,
thrown away or a sub-agent's. So the trace gives two numbers, and the log must lie between them; in an ordinary rollout
they are the same.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.harness.base import HarnessRecipe
from pipeline.records import Trace

WINDOW = 1 << 20  # bytes that are searched at once, up to the end of a line


@dataclass(frozen=True)
class ToolCalls:
    """``counted``: in delivered answers to the harness; what rewards and reports use. ``logged``: by the harness, None
    without a log. A log that agrees lies between ``certain`` and ``possible``.
    """

    counted: int
    certain: int
    possible: int
    logged: int | None = None
    comparable: bool = True

    @property
    def differs(self) -> bool | None:
        """Whether the log contradicts the trace; None where there is nothing to compare."""
        if self.logged is None or not self.comparable:
            return None
        return not self.certain <= self.logged <= self.possible


def count_tool_calls(trace: Trace, recipe: HarnessRecipe, logged: int | None) -> ToolCalls:
    """The calls of a trace, compared with the harness's log.

    Certain: well-formed calls of the first conversation that a later history builds on, so the harness ran them.
    Possible: every call in any answer to the harness, malformed, thrown away, undelivered and sub-agents' included.
    Of a harness that takes commands as text the trace holds no calls, and the log alone counts.
    """
    own = [call for call in trace.calls if not call.foreign]
    if recipe.by_text:
        return ToolCalls(logged or 0, 0, 0, logged, comparable=False)
    first = _first_conversation(trace)
    followed = {call.parent for call in own}
    certain = [c for c in own if c.call_id in followed & first and c.delivered and not c.malformed]
    return ToolCalls(
        counted=sum(call.tool_calls for call in own if call.delivered),
        certain=sum(call.tool_calls for call in certain),
        possible=sum(call.tool_calls for call in own),
        logged=logged,
    )


def _first_conversation(trace: Trace) -> set[int]:
    """The calls below the first one: later roots are sub-agents, or histories that were rewritten."""
    found: set[int] = set()
    for call in trace.calls:
        if not found or call.parent in found:
            found.add(call.call_id)
    return found


def matches(path: Path, expression: str) -> int:
    """How often a regular expression matches in a file, however long that is; matches lie within a line."""
    if not path.exists() or not path.stat().st_size:
        return 0
    pattern = re.compile(expression.encode())
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return sum(1 for start, end in _windows(text) for _ in pattern.finditer(text, start, end))


def _windows(text: mmap.mmap) -> Iterator[tuple[int, int]]:
    start = 0
    while start < len(text):
        line_end = text.find(b"\n", start + WINDOW)
        end = len(text) if line_end < 0 else line_end + 1
        yield start, end
        start = end

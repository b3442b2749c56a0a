"""Text for prompts and tool results: real source code, with its JSON form prepared, so that a passage is two slices."""

from __future__ import annotations

import argparse
import asyncio.base_events
import inspect
import itertools
import typing
import zlib
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

import msgspec

from bench.tokens import Span, hashed_span, text_span

FOREIGN = "# naïve façade – 東京 ✓\n"  # so that characters of two to four bytes are among the text
FOREIGN_EVERY = 40


def _lines() -> list[str]:
    sources = [inspect.getsource(module) for module in (typing, argparse, asyncio.base_events)]
    lines = "".join(sources).splitlines(keepends=True)
    for at in range(0, len(lines), FOREIGN_EVERY):
        lines[at] = FOREIGN
    return lines


_LINES = [line.encode() for line in _lines()]
_JSON_LINES = [msgspec.json.encode(line.decode())[1:-1] for line in _LINES]
_TEXT, _JSON = b"".join(_LINES), b"".join(_JSON_LINES)
_STARTS = [0, *itertools.accumulate(map(len, _LINES))]
_JSON_STARTS = [0, *itertools.accumulate(map(len, _JSON_LINES))]
SIZE = len(_TEXT)


@dataclass(frozen=True)
class Passage:
    """``prefix`` (ASCII, no quotes or backslashes) and the lines [first, last) of the filler."""

    prefix: str
    first: int
    last: int

    @property
    def text(self) -> bytes:
        return self.prefix.encode() + _TEXT[_STARTS[self.first] : _STARTS[self.last]]

    @property
    def json(self) -> bytes:
        """The text inside a JSON string, without quotes."""
        prefix = self.prefix.replace("\n", "\\n").encode()
        return prefix + _JSON[_JSON_STARTS[self.first] : _JSON_STARTS[self.last]]

    @cached_property
    def span(self) -> Span:
        body = memoryview(_TEXT)[_STARTS[self.first] : _STARTS[self.last]]
        prefix = self.prefix.encode()
        return hashed_span(zlib.crc32(body, zlib.crc32(prefix)), len(prefix) + len(body))


def passage(prefix: str, at: int, size: int) -> Passage:
    """About ``size`` bytes from byte ``at`` on (round the end), at least one line."""
    first = min(bisect_left(_STARTS, at % max(1, SIZE - size)), len(_LINES) - 1)
    last = min(bisect_left(_STARTS, _STARTS[first] + size), len(_LINES))
    return Passage(prefix, first, max(first + 1, last))


def span_of(text: str) -> Span:
    """The tokens of any other text."""
    return text_span(text.encode())


SYSTEM = passage("You are a coding agent.\n", 0, 9000)
"""The system prompt of every session."""

TOOL_NAMES = [f"tool{index}" for index in range(14)]


def tool_description(index: int) -> str:
    """What tool ``index`` says about itself."""
    return passage("", 10_000 + 500 * index, 400).text.decode()


PARAMETERS = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": passage("", 9_000, 250).text.decode()},
        "timeout": {"type": "integer"},
    },
    "required": ["command"],
}

"""A deterministic tokenizer and chat template, shared by the fake engine and the checker.

The ids and logprobs of any text are a slice of one fixed pseudo-random pool, and the text of a sampled answer carries
its own seed: "[[c:SEED:SIZE:LATENCY_MS:CALL]] …", where the last CALL of SIZE ids are those of its tool call. So both
processes know every token of a trace without talking to each other. Ids travel as JSON text: slices of one string.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

POOL_SIZE = 1 << 18
BYTES_PER_TOKEN = 4

START, OPEN, CLOSE, NEWLINE, CALL, ARGUMENTS, CALL_END, THOUGHT, THOUGHT_END = 7, 11, 12, 13, 14, 15, 16, 17, 18
ROLES = {"system": 21, "user": 22, "assistant": 23, "tool": 24}
OTHER_ROLE = 29
MARK = re.compile(r"\[\[c:(\d+):(\d+):(\d+):(\d+)\]\]")
CALL_SIZE = 24  # ids of a tool call in a sampled answer

_random = np.random.default_rng(20261129)
POOL: NDArray[np.int32] = _random.integers(100, 151_000, POOL_SIZE, dtype=np.int32)
LOGPROB_DECIMALS: list[float] = (-np.round(_random.random(POOL_SIZE) * 3, 6) - 1e-6).tolist()
LOGPROBS: NDArray[np.float32] = np.asarray(LOGPROB_DECIMALS, dtype=np.float32)
CLOSE_LOGPROB = -1e-06


class Span(NamedTuple):
    """A slice of the pool."""

    offset: int
    size: int

    @property
    def ids(self) -> NDArray[np.int32]:
        return POOL[self.offset : self.offset + self.size]

    def first(self, size: int) -> Span:
        """Its beginning."""
        return Span(self.offset, size)


class Pieces:
    """Prepared JSON texts of every pool entry, of which any slice is one cut."""

    def __init__(self, entries: Iterable[bytes]) -> None:
        listed = list(entries)
        self._text = b",".join(listed)
        sizes = np.fromiter((len(entry) + 1 for entry in listed), dtype=np.int64, count=len(listed))
        self._starts: list[int] = [0, *np.cumsum(sizes).tolist()]

    def cut(self, span: Span) -> bytes:
        """The span's entries, joined by commas."""
        return self._text[self._starts[span.offset] : self._starts[span.offset + span.size] - 1]


ID_PIECES = Pieces(b"%d" % token for token in POOL.tolist())


def text_span(text: bytes) -> Span:
    """The tokens of a text that is not sampled; b"" has none."""
    return hashed_span(zlib.crc32(text), len(text))


def hashed_span(crc: int, length: int) -> Span:
    """``text_span`` of a text of which only checksum and length in bytes are at hand."""
    size = min(-(-length // BYTES_PER_TOKEN), POOL_SIZE // 2)
    return Span(crc % (POOL_SIZE - size), size)


def sampled_span(seed: int, size: int) -> Span:
    """The tokens of one sampled answer, without the CLOSE that ends it."""
    return Span(seed * 2654435761 % (POOL_SIZE - size), size)


def answer_text(seed: int, size: int, latency_ms: int, call_size: int) -> str:
    """The text of a sampled answer."""
    return f"[[c:{seed}:{size}:{latency_ms}:{call_size}]] Let me look at the next file and run the tests."


def answer_arguments(seed: int) -> str:
    """The arguments of its tool call, spaced as no serialiser would write them."""
    return f'{{"command":  "sed -n 1,{seed}p a.py"}}'


def call_text(name: str, arguments: str) -> bytes:
    """A tool call, as ids."""
    name_ids, argument_ids = (ID_PIECES.cut(text_span(text.encode())) for text in (name, arguments))
    return b"%d,%b,%d,%b,%d" % (CALL, name_ids, ARGUMENTS, argument_ids, CALL_END)


def message_text(role: str, parts: Iterable[bytes]) -> bytes:
    """A whole message, as ids; empty parts have none."""
    inner = b"".join(part + b"," for part in parts if part)
    return b"%d,%d,%b%d,%d" % (OPEN, ROLES.get(role, OTHER_ROLE), inner, CLOSE, NEWLINE)


def prompt_text(messages: Iterable[bytes], tool_count: int) -> bytes:
    """Whole messages and what asks for an answer, as ids."""
    return b"%d,%d,%b,%d,%d" % (START, tool_count, b",".join(messages), OPEN, ROLES["assistant"])


def flat(content: Any) -> str:
    """The text of a message's content."""
    if isinstance(content, list):
        return "\n".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content or ""

"""Rows packed as a forest: every prefix that rows share is there once, and each row sees its own path only.

The tokens stand in depth-first order, so what follows a segment (a run without a fork) inside its tree is contiguous:
attention is one causal call over all segments and one call a level, in which those below a segment look up to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

LEAST_SHARED = 32  # tokens: a shorter run is cheaper computed again than attended to apart

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Blocks:
    """One attention call: the tokens of ``queries[i]`` see those of ``keys[i]``, all or (causal) up to themselves.

    Spans are [start, stop) of the packed tokens; no two of ``queries`` overlap, nor two of ``keys``.
    """

    queries: tuple[slice, ...]
    keys: tuple[slice, ...]
    causal: bool


@dataclass(frozen=True)
class Forest:
    """Packed rows. ``places[i]`` says where each token of row i stands; shared tokens stand in several."""

    input_ids: Int[Tensor, "tokens"]
    position_ids: Int[Tensor, "tokens"]
    places: tuple[npt.NDArray[np.int64], ...]
    calls: tuple[Blocks, ...]


@dataclass
class Growth:
    """A forest while rows are added in lexicographic order; knows how many tokens it holds."""

    tokens: int = 0
    last: Ids | None = None
    forks: list[int] = field(default_factory=list)  # depths at which the last row's path forks

    def shared(self, row: Ids) -> int:
        """How many leading tokens of ``row`` are there already; a fork close below another moves up to it."""
        common = 0 if self.last is None else _common(self.last, row)
        fork = max((depth for depth in self.forks if depth <= common), default=0)
        return common if common - fork >= LEAST_SHARED else fork

    def add(self, row: Ids) -> int:
        """Append what is new of ``row`` and return how much was shared."""
        shared = self.shared(row)
        self.tokens += len(row) - shared
        self.forks = [depth for depth in self.forks if depth < shared] + [shared]
        self.last = row
        return shared


def _common(left: Ids, right: Ids) -> int:
    length = min(len(left), len(right))
    differ = left[:length] != right[:length]
    return int(differ.argmax()) if differ.any() else length


def lexicographic(rows: Sequence[Ids]) -> list[int]:
    """Indices of ``rows`` in the order in which rows of one prefix are neighbours."""
    return sorted(range(len(rows)), key=lambda index: rows[index].astype(">u4").tobytes())


def build_forest(rows: Sequence[Ids]) -> Forest:
    """Pack ``rows``; their order does not matter."""
    growth = Growth()
    places: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)] * len(rows)
    previous = places[0]
    ids, positions, starts = [], [], {}
    for index in lexicographic(rows):
        row, start = rows[index], growth.tokens
        shared = growth.add(row)
        previous = places[index] = np.concatenate([previous[:shared], np.arange(start, growth.tokens)])
        if growth.tokens > start:
            ids.append(row[shared:])
            positions.append(np.arange(shared, len(row)))
            starts[start] = int(previous[shared - 1]) if shared else -1
    return Forest(
        input_ids=torch.from_numpy(np.concatenate(ids).astype(np.int64)),
        position_ids=torch.from_numpy(np.concatenate(positions)),
        places=tuple(places),
        calls=_calls(starts, growth.tokens),
    )


def _calls(starts: dict[int, int], tokens: int) -> tuple[Blocks, ...]:
    """Attention calls of a forest whose branches start at the keys, each below the token that is its value (-1: none).

    Branches attach to the last path only, hence depth-first order.
    """
    cuts = sorted({*starts, *(above + 1 for above in starts.values() if above >= 0)})
    segments = [slice(start, stop) for start, stop in zip(cuts, [*cuts[1:], tokens], strict=True)]
    levels: list[int] = []
    for segment in segments:
        above = starts.get(segment.start, segment.start - 1)
        levels.append(0 if above < 0 else levels[_segment_of(cuts, above)] + 1)
    below = [slice(segment.stop, _end(segments, levels, index)) for index, segment in enumerate(segments)]
    return (Blocks(tuple(segments), tuple(segments), True), *_levels(segments, levels, below))


def _segment_of(cuts: Sequence[int], token: int) -> int:
    return int(np.searchsorted(cuts, token, side="right")) - 1


def _end(segments: Sequence[slice], levels: Sequence[int], index: int) -> int:
    """Where the tree below a segment ends: before the next segment that is not deeper."""
    deeper = index + 1
    while deeper < len(levels) and levels[deeper] > levels[index]:
        deeper += 1
    return int(segments[deeper - 1].stop)


def _levels(segments: Sequence[slice], levels: Sequence[int], below: Sequence[slice]) -> Iterator[Blocks]:
    for level in range(max(levels)):
        pairs = [
            (under, segment)
            for segment, own, under in zip(segments, levels, below, strict=True)
            if own == level and under.start < under.stop
        ]
        yield Blocks(tuple(under for under, _ in pairs), tuple(segment for _, segment in pairs), False)

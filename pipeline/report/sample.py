"""A sample of things of several kinds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def spread(things: Iterable[T], kind: Callable[[T], Any], size: int) -> list[T]:
    """At most ``size`` of the things: one of each kind in turn, kinds sorted, the last thing of a kind first."""
    kinds: dict[Any, list[T]] = defaultdict(list)
    for thing in things:
        kinds[kind(thing)].append(thing)
    chosen: list[T] = []
    while len(chosen) < size and any(kinds.values()):
        chosen += [own.pop() for _, own in sorted(kinds.items()) if own]
    return chosen[:size]

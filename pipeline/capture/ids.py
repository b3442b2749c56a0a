"""Token ids as int32 bytes: four bytes an id, compared, hashed and journalled without ever becoming a list."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

WIDTH = 4  # bytes of one id, and of one float32 logprob


def pack(ids: Sequence[int]) -> bytes:
    """Ids as int32 bytes. Raises OverflowError for an id beyond 31 bits."""
    return array("i", ids).tobytes()


def unpack(data: bytes | bytearray) -> list[int]:
    """The ids of int32 bytes."""
    ids = array("i")
    ids.frombytes(data)
    return ids.tolist()


def pack_floats(values: Sequence[float]) -> bytes:
    """Floats as float32 bytes."""
    return array("f", values).tobytes()


def shared_prefix(one: bytes, other: bytes) -> int:
    """How many leading ids two sequences share, by bisection over memory comparisons."""
    low, high = 0, min(len(one), len(other)) // WIDTH
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * WIDTH : middle * WIDTH] == other[low * WIDTH : middle * WIDTH]:
            low = middle
        else:
            high = middle - 1
    return low

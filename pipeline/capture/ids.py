"""Token ids as the JSON text that the engine speaks ("17,4,99"): spliced, compared and journalled, never made lists.

A sequence is such a text without brackets; the empty text is the empty sequence.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import msgspec

SPACED = 64  # an engine that puts spaces between ids does so from the beginning
WIDTH = 4  # bytes of one float32 logprob


def text_of(ids: Sequence[int]) -> bytes:
    """Ids as text."""
    return msgspec.json.encode(ids)[1:-1]


def inner(raw: msgspec.Raw) -> bytes:
    """The text of a JSON list of ids, as it came from an engine."""
    text = bytes(memoryview(raw)[1:-1])
    return b"".join(text.split()) if b" " in text[:SPACED] else text


def numbers(text: bytes) -> list[int]:
    """The ids of a text."""
    ids: list[int] = msgspec.json.decode(b"[%b]" % text, type=list[int])
    return ids


def count(text: bytes) -> int:
    """How many ids a text holds."""
    return text.count(b",") + 1 if text else 0


def join(parts: Iterable[bytes]) -> bytes:
    """One sequence after the other."""
    return b",".join(part for part in parts if part)


def last(text: bytes) -> bytes:
    """The text of the last id."""
    return text[text.rfind(b",") + 1 :]


def without_last(text: bytes) -> bytes:
    """All but the last id."""
    return text[: max(0, text.rfind(b","))]


def tail(text: bytes, most: int) -> bytes:
    """The last ``most`` ids, or all."""
    start = len(text)
    for _ in range(most):
        start = text.rfind(b",", 0, start)
        if start < 0:
            return text
    return text[start + 1 :]


def starts_with(text: bytes, length: int) -> bool:
    """Whether the first ``length`` bytes of a text end where an id ends."""
    return length == len(text) or (length < len(text) and text[length] == ord(","))


def shared_prefix(one: bytes, other: bytes) -> int:
    """The length in bytes of the longest common beginning of whole ids, by bisection over memory comparisons."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    if starts_with(one, low) and starts_with(other, low):
        return low
    return max(0, one.rfind(b",", 0, low))


def pack_floats(values: Sequence[float]) -> bytes:
    """Floats as float32 bytes."""
    return array("f", values).tobytes()

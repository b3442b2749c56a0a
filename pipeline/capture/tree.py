"""A session's calls as a tree over token ids: parents, retries, and the ids themselves, stored once."""

from __future__ import annotations

from bisect import insort

import xxhash

from pipeline.capture import ids
from pipeline.capture.journal import Node


class Tree:
    """Calls in the order of their answers. Memory is linear in distinct ids: a node stores what its base lacks."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._ends: dict[int, list[int]] = {}  # hash of a whole sequence -> the calls that have it
        self._lengths: list[int] = []  # distinct lengths of those sequences, ascending
        self._hashed = 0  # calls whose sequences are in the two above: only full renders need them

    def sequence(self, call_id: int) -> bytes:
        """Prompt and sampled ids of a call."""
        chain: list[Node] = []
        current: int | None = call_id
        while current is not None:
            chain.append(self.nodes[current])
            current = chain[-1].base
        parts: list[bytes] = []
        length = 0
        for node in reversed(chain):
            if node.keep < length:
                parts, length = _cut(parts, node.keep)
            for part in (node.suffix, node.sampled):
                if part:
                    parts.append(part)
                    length += len(part) + (length > 0)
        return b",".join(parts)

    def prompt(self, call_id: int) -> bytes:
        """Prompt ids of a call."""
        data, sampled = self.sequence(call_id), self.nodes[call_id].sampled
        return data[: max(0, len(data) - len(sampled) - 1)] if sampled else data

    def parent(self, prompt: bytes) -> int | None:
        """The call whose prompt + sampled ids are the longest prefix of this prompt.

        Of equals it is one that the harness got, and the latest.
        """
        self._hash()
        found: list[int] = []
        position, digest = 0, xxhash.xxh3_128()
        for length in self._lengths:
            if length > len(prompt):
                break
            digest.update(prompt[position:length])
            position = length
            if ids.starts_with(prompt, length):
                found = self._ends.get(digest.intdigest(), found)
        return max(found, key=lambda call_id: (self.nodes[call_id].delivered, call_id), default=None)

    def _hash(self) -> None:
        for call_id in range(self._hashed, len(self.nodes)):
            data = self.sequence(call_id)
            end = xxhash.xxh3_128_intdigest(data)
            if len(data) not in self._lengths:
                insort(self._lengths, len(data))
            self._ends.setdefault(end, []).append(call_id)
        self._hashed = len(self.nodes)

    def base(self, prompt: bytes, parent: int | None) -> tuple[int | None, int]:
        """(call, bytes shared with it) to store a prompt against: the parent, or the latest if that shares more."""
        if not self.nodes:
            return None, 0
        latest = len(self.nodes) - 1
        choices = {
            call: ids.shared_prefix(self.sequence(call), prompt) for call in (parent, latest) if call is not None
        }
        best = max(choices, key=lambda call: choices[call])
        return (best, choices[best]) if choices[best] else (None, 0)

    def add(self, node: Node) -> None:
        """Append a call whose id is the next one. A parent that has a child was delivered, whatever was noted."""
        assert node.call_id == len(self.nodes), f"call {node.call_id} added out of order"
        self.nodes.append(node)
        if node.parent is not None:
            self.nodes[node.parent].delivered = True


def _cut(parts: list[bytes], keep: int) -> tuple[list[bytes], int]:
    """The first ``keep`` bytes of joined parts."""
    kept = b",".join(parts)[:keep]
    return ([kept] if kept else []), keep

"""A session's calls as a tree over token ids: parents, retries, and the ids themselves, stored once."""

from __future__ import annotations

from bisect import insort

import xxhash

from pipeline.capture.ids import WIDTH, shared_prefix
from pipeline.capture.journal import Node


class Tree:
    """Calls in the order of their answers. Memory is linear in distinct ids: a node stores what its base lacks."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._ends: dict[int, int] = {}  # hash of a call's whole sequence -> call
        self._lengths: list[int] = []  # distinct byte lengths of those sequences, ascending
        self._prompts: dict[int, list[int]] = {}  # hash of a prompt -> calls that asked it

    def sequence(self, call_id: int) -> bytes:
        """Prompt and sampled ids of a call, as int32 bytes."""
        chain: list[Node] = []
        current: int | None = call_id
        while current is not None:
            chain.append(self.nodes[current])
            current = chain[-1].base
        data = bytearray()
        for node in reversed(chain):
            del data[node.keep * WIDTH :]
            data += node.suffix
            data += node.sampled
        return bytes(data)

    def prompt(self, call_id: int) -> bytes:
        """Prompt ids of a call, as int32 bytes."""
        data = self.sequence(call_id)
        return data[: len(data) - len(self.nodes[call_id].sampled)]

    def parent(self, prompt: bytes) -> int | None:
        """The call whose prompt + sampled ids are the longest prefix of this prompt (the latest of equals)."""
        found, position, digest = None, 0, xxhash.xxh3_128()
        for length in self._lengths:
            if length > len(prompt):
                break
            digest.update(prompt[position:length])
            position = length
            found = self._ends.get(digest.intdigest(), found)
        return found

    def undelivered(self, prompt: bytes, constraint: str) -> Node | None:
        """The earliest call with exactly this prompt whose answer the harness never got."""
        for call_id in self._prompts.get(xxhash.xxh3_128_intdigest(prompt), ()):
            node = self.nodes[call_id]
            if not node.delivered and node.constraint == constraint:
                return node
        return None

    def base(self, prompt: bytes, parent: int | None) -> tuple[int | None, int]:
        """(call, ids shared with it) to store a prompt against: the parent, or the latest call if that shares more."""
        if not self.nodes:
            return None, 0
        latest = len(self.nodes) - 1
        choices = {call: shared_prefix(self.sequence(call), prompt) for call in (parent, latest) if call is not None}
        best = max(choices, key=lambda call: choices[call])
        return (best, choices[best]) if choices[best] else (None, 0)

    def add(self, node: Node) -> None:
        """Append a call whose id is the next one. A parent that has a child was delivered, whatever was noted."""
        assert node.call_id == len(self.nodes), f"call {node.call_id} added out of order"
        self.nodes.append(node)
        data = self.sequence(node.call_id)
        end = xxhash.xxh3_128_intdigest(data)
        if end not in self._ends and len(data) not in self._lengths:
            insort(self._lengths, len(data))
        self._ends[end] = node.call_id
        prompt = xxhash.xxh3_128_intdigest(data[: len(data) - len(node.sampled)])
        self._prompts.setdefault(prompt, []).append(node.call_id)
        if node.parent is not None:
            self.nodes[node.parent].delivered = True

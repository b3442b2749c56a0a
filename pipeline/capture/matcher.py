"""Finds the call that an incoming history continues, by a hash chain over canonical atoms.

A replayed assistant turn that equals a known answer enters the chain as that call, so lossy replays (re-serialised
arguments, dropped thoughts, trimmed text) do not change what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from pipeline.capture.canonical import Atom, ReplayedCall, canonical_json
from pipeline.capture.dialects.base import Answer
from pipeline.capture.journal import Node


@dataclass(frozen=True)
class Match:
    """Where a history stands in the tree: its own chain, the call it continues, and the first item after that."""

    chain: bytes
    parent: int | None = None
    after: int = 0
    rewritten: bool = False  # the harness put other arguments under our call ids


@dataclass(frozen=True)
class _Known:
    """An answer in the form in which replays are compared with it."""

    text: str
    calls: tuple[ReplayedCall, ...]

    @classmethod
    def of(cls, answer: Answer) -> _Known:
        calls = (ReplayedCall(call.id, call.name, canonical_json(call.arguments)) for call in answer.tool_calls)
        return cls(answer.text, tuple(calls))


class Matcher:
    """The answers of one session by the chain of the history that each answered."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._known: list[_Known] = []
        self._asked: dict[bytes, list[int]] = {}

    def add(self, node: Node) -> None:
        """Take in the next call."""
        self._known.append(_Known.of(node.answer))
        self._asked.setdefault(node.chain, []).append(node.call_id)

    def asked(self, chain: bytes) -> Sequence[int]:
        """The calls that answered exactly this history, oldest first."""
        return self._asked.get(chain, ())

    def walk(self, root: bytes, items: Sequence[tuple[Atom, ...]]) -> Match:
        """The longest known beginning of a history. ``root`` tells apart what is no message (tools, switches)."""
        chain, parent, after, rewritten = root, None, 0, False
        turn: list[Atom] = []
        for index, atoms in enumerate(items):
            for atom in atoms:
                if atom.role == "assistant":
                    turn.append(atom)
                    continue
                if turn:
                    chain, found, changed = self._answered(chain, turn)
                    if found is not None:
                        parent, after, rewritten = found, index, rewritten or changed
                    turn = []
                chain = xxhash.xxh3_128_digest(b"%b%b%b" % (chain, atom.role.encode(), atom.digest))
        if turn:
            chain, found, changed = self._answered(chain, turn)
            if found is not None:
                parent, after, rewritten = found, len(items), rewritten or changed
        return Match(chain, parent, after, rewritten)

    def _answered(self, chain: bytes, turn: Sequence[Atom]) -> tuple[bytes, int | None, bool]:
        """The chain after an assistant turn, and the call whose answer it is."""
        text = "".join(atom.text for atom in turn)
        calls = tuple(call for atom in turn for call in atom.calls)
        for call_id in self._candidates(chain):
            verdict = _compare(text, calls, self._known[call_id])
            if verdict is not None:
                return xxhash.xxh3_128_digest(b"%b=%d" % (chain, call_id)), call_id, verdict
        foreign = repr((text, [call[1:] for call in calls])).encode()
        return xxhash.xxh3_128_digest(chain + b"?" + foreign), None, False

    def _candidates(self, chain: bytes) -> list[int]:
        """The answers to a history, delivered ones first, the latest first."""
        asked = self._asked.get(chain)
        if not asked or len(asked) == 1:
            return asked or []
        return sorted(asked, key=lambda call_id: (self._nodes[call_id].delivered, call_id), reverse=True)


def _compare(text: str, calls: tuple[ReplayedCall, ...], known: _Known) -> bool | None:
    """None: another answer; False: this one; True: this one with other arguments under our ids."""
    if len(calls) != len(known.calls) or not _same_text(text, known):
        return None
    rewritten = False
    for call, ours in zip(calls, known.calls, strict=True):
        equal = call.name == ours.name and call.arguments == ours.arguments
        if not equal and call.id != ours.id:
            return None
        rewritten = rewritten or not equal
    return rewritten


def _same_text(text: str, known: _Known) -> bool:
    if text == known.text or (not text and known.calls):
        return True
    return "".join(text.split()) == "".join(known.text.split())

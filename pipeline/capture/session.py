"""One rollout's state in a shard, and how it is written to and read from a journal."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from pipeline.capture import budget
from pipeline.capture.canonical import Memo
from pipeline.capture.journal import Answered, Closed, Counted, Delivered, Node, Opened, Policy, Record
from pipeline.capture.matcher import Matcher
from pipeline.capture.origin import Origin
from pipeline.capture.transcript import Transcript
from pipeline.capture.tree import Tree
from pipeline.capture.upstream import Frame


class Session:
    """The trace so far, the budget and the counters of one session."""

    def __init__(self, session_id: str, policy: Policy, opened: float | None = None) -> None:
        self.id = session_id
        self.policy = policy
        self.opened = time.time() if opened is None else opened
        self.touched = time.monotonic()
        self.tree = Tree()
        self.matcher = Matcher(self.tree.nodes)
        self.transcript = Transcript()
        self.memo = Memo()
        self.frames: dict[tuple[bytes, str], Frame] = {}  # (tools, constraint) -> what the engine made of them
        self.counters: Counter[str] = Counter()
        self.wishes: dict[str, Any] = {}  # of the latest call
        self.started = 0  # calls that the engine began, the aborted ones included
        self.tokens = 0  # of all prompts and samples
        self.tool_ids = 0
        self.closing = False  # no new turn is taken
        self.turns: set[asyncio.Task[object]] = set()  # until the answer is delivered
        self.answering: set[asyncio.Task[object]] = set()  # those of them that a cancellation aborts

    @property
    def suffix(self) -> str:
        """A short form of the id for answers and tool calls; not enough to guess the key from."""
        return hashlib.blake2b(self.id.encode(), digest_size=4).hexdigest()

    @property
    def dialect(self) -> str:
        """The dialect of the first call; "" before it."""
        return self.tree.nodes[0].dialect if self.tree.nodes else ""

    @property
    def first_answer(self) -> float:
        """When the first call was answered (CLOCK_BOOTTIME); infinity before it."""
        return self.tree.nodes[0].answered if self.tree.nodes else math.inf

    def tally(self) -> dict[str, int]:
        """The counters, with the calls from a sandbox that its harness did not make or may not have made."""
        strange = (node.origin for node in self.tree.nodes if node.origin in (Origin.FOREIGN, Origin.UNKNOWN))
        return {**self.counters, **Counter(map(str, strange))}

    def reserve(self) -> None:
        """Take one call of the budget. Raises BudgetSpent."""
        budget.check(self.policy, self.started, self.tokens, time.time() - self.opened)
        self.started += 1

    def release(self) -> None:
        """Give back a call that the engine could not serve."""
        self.started -= 1

    def next_tool_id(self) -> str:
        """A tool-call id that no other call of this session has."""
        self.tool_ids += 1
        return f"call_{self.suffix}_{self.tool_ids}"

    def undelivered(self, chain: bytes, constraint: str, foreign: bool) -> Node | None:
        """The earliest answer to exactly this history that whoever asked (the harness, or not) never got."""
        for call_id in self.matcher.asked(chain):
            node = self.tree.nodes[call_id]
            same = node.constraint == constraint and (node.origin is Origin.FOREIGN) == foreign
            if same and not node.delivered:
                return node
        return None

    def news(self, wishes: dict[str, Any]) -> dict[str, Any] | None:
        """A harness's wishes as a node keeps them: None when they are those of the call before."""
        return None if wishes == self.wishes else wishes

    def add(self, node: Node) -> None:
        """Append a call."""
        self.tree.add(node)
        self.matcher.add(node)
        self.tokens += node.answer.prompt_tokens + node.answer.completion_tokens
        self.wishes = self.wishes if node.wishes is None else node.wishes
        if node.asked is not None:
            self.transcript.add(node.asked)

    def apply(self, record: Record) -> None:
        """Take in one record of a journal."""
        match record:
            case Answered(node=node):
                self.add(node)
                self.started += 1
                self.tool_ids += len(node.answer.tool_calls)
            case Delivered(call_id=call_id):
                self.tree.nodes[call_id].delivered = True
            case Counted(counter=counter, amount=amount):
                self.counters[counter] += amount
                self.started += amount if counter == "aborted" else 0

    def records(self) -> Iterator[Record]:
        """The session as the shortest journal that restores it."""
        yield Opened(self.id, self.policy, self.opened)
        for node in self.tree.nodes:
            yield Answered(self.id, node)
        for counter, amount in self.counters.items():
            yield Counted(self.id, counter, amount)


def restore(records: Iterable[Record]) -> dict[str, Session]:
    """The sessions that a journal leaves open."""
    sessions: dict[str, Session] = {}
    for record in records:
        if isinstance(record, Opened):
            sessions[record.session] = Session(record.session, record.policy, record.time)
        elif isinstance(record, Closed):
            sessions.pop(record.session, None)
        elif record.session in sessions:
            sessions[record.session].apply(record)
    return sessions


def file_name(session_id: str) -> str:
    """The name of a session's trace file; a hash, since the id is a key."""
    return f"{hashlib.blake2b(session_id.encode(), digest_size=16).hexdigest()}.trace"

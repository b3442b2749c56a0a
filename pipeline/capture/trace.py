"""From a session as the shard kept it to the Trace that other rooms use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pipeline.capture import ids, journal
from pipeline.capture.journal import Node
from pipeline.capture.origin import Origin
from pipeline.capture.session import Session, restore
from pipeline.capture.tree import Tree
from pipeline.records import Call, PolicyVersion, Trace, VersionSpan


def read_trace(path: Path) -> Trace:
    """The trace in a trace file. Raises ValueError as ``read_session`` does."""
    return trace_of(read_session(path))


def read_session(path: Path) -> Session:
    """The session in a trace file, as its shard had it. Raises ValueError when it does not hold exactly one."""
    sessions = list(restore(journal.read(path)).values())
    if len(sessions) != 1:
        raise ValueError(f"{path} holds {len(sessions)} sessions instead of one")
    return sessions[0]


def array_of(text: bytes) -> np.ndarray:
    """The ids of a text as an int32 array."""
    return np.array(ids.numbers(text), np.int32)


def trace_of(session: Session) -> Trace:
    """A session's calls with their full ids."""
    calls = tuple(_call(node, prompt) for node, prompt in zip(session.tree.nodes, _prompts(session.tree), strict=True))
    transcript = session.transcript.export(session.tree.nodes)
    return Trace(session.id, calls, session.dialect, session.tally(), transcript)


def _prompts(tree: Tree) -> Iterator[np.ndarray]:
    """The prompt ids of every call. Each text is read once, not once for every call that builds on it."""
    sequences: list[np.ndarray] = []
    for node in tree.nodes:
        shared = np.zeros(0, np.int32)
        if node.base is not None:
            shared = sequences[node.base][: ids.count(tree.sequence(node.base)[: node.keep])]
        prompt = np.concatenate([shared, array_of(node.suffix)])
        sequences.append(np.concatenate([prompt, array_of(node.sampled)]))
        yield prompt


def _call(node: Node, prompt: np.ndarray) -> Call:
    spans = (VersionSpan(PolicyVersion.parse(version), start, end) for version, start, end in node.versions)
    return Call(
        call_id=node.call_id,
        parent=node.parent,
        prompt_ids=prompt,
        sampled_ids=array_of(node.sampled),
        logprobs=np.frombuffer(node.logprobs, np.float32),
        versions=tuple(spans),
        finish_reason=node.answer.finish_reason,
        delivered=node.delivered,
        trainable=node.trainable,
        tool_calls=len(node.answer.tool_calls),
        malformed=node.malformed,
        seconds=node.seconds,
        foreign=node.origin is Origin.FOREIGN,
    )

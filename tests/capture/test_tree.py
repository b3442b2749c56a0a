"""The trace tree and the journal, against brute force."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.capture import journal
from pipeline.capture.dialects.base import Answer, ToolCall
from pipeline.capture.ids import numbers, pack_floats, shared_prefix, text_of
from pipeline.capture.journal import Answered, Closed, Counted, Delivered, Journal, Node, Opened, Policy
from pipeline.capture.session import Session, restore
from pipeline.capture.trace import read_trace

POLICY = Policy(1.0, 10, 10, "m")
ANSWER = Answer("a", "text", "", (), "stop", 1, 1, 0, 0)
TOKENS = st.lists(st.sampled_from([1, 11]), min_size=1, max_size=6)
# A call: continue the sequence of an earlier call (by index; beyond the end: of none) by a suffix, and what is sampled.
CALLS = st.lists(st.tuples(st.integers(0, 8), TOKENS, TOKENS), min_size=1, max_size=8)


def add(session: Session, prompt: list[int], sampled: list[int], delivered: bool = True, constraint: str = "") -> Node:
    """What the turn does with a sample after a prompt that was rendered whole."""
    text = text_of(prompt)
    parent = session.tree.parent(text)
    base, keep = session.tree.base(text, parent)
    node = Node(
        call_id=len(session.tree.nodes),
        parent=parent,
        base=base,
        keep=keep,
        suffix=text[keep + 1 :] if keep else text,
        sampled=text_of(sampled),
        logprobs=pack_floats([0.0] * len(sampled)),
        versions=[("1.0", 0, len(sampled))],
        answer=ANSWER,
        chain=text,
        constraint=constraint,
        dialect="chat",
        trainable=True,
        malformed=False,
        delivered=delivered,
    )
    session.add(node)
    return node


def grow(calls: list[tuple[int, list[int], list[int]]]) -> tuple[Session, list[list[int]], list[list[int]]]:
    """A session with these calls; their prompts and whole sequences."""
    session, prompts, sequences = Session("s", POLICY), [], []
    for origin, suffix, sampled in calls:
        prompts.append((sequences[origin] if origin < len(sequences) else []) + suffix)
        sequences.append(prompts[-1] + sampled)
        add(session, prompts[-1], sampled)
    return session, prompts, sequences


@given(CALLS)
def test_parents_are_the_longest_prefixes_and_ids_come_back(calls: list[tuple[int, list[int], list[int]]]) -> None:
    session, prompts, sequences = grow(calls)
    for node, prompt, sequence in zip(session.tree.nodes, prompts, sequences, strict=True):
        before = sequences[: node.call_id]
        lengths = [len(other) for other in before if prompt[: len(other)] == other]
        found = len(sequences[node.parent]) if node.parent is not None else None
        assert found == (max(lengths) if lengths else None)
        assert node.parent is None or prompt[:found] == sequences[node.parent]
        assert numbers(session.tree.prompt(node.call_id)) == prompt
        assert numbers(session.tree.sequence(node.call_id)) == sequence


@settings(max_examples=30)
@given(CALLS, st.integers(0, 200))
def test_a_torn_journal_restores_every_whole_record(calls: list[tuple[int, list[int], list[int]]], cut: int) -> None:
    session, prompts, _ = grow(calls)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal"
        journal.write(path, session.records())
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) - cut])
        kept = sum(isinstance(record, Answered) for record in journal.read(path))
        later = Journal(path)
        later.append(Opened("t", POLICY))
        later.close()
        sessions = restore(journal.read(path))
    assert cut or kept == len(calls)
    assert "t" in sessions
    if "s" in sessions:
        assert sessions["s"].started == kept
        for call_id in range(kept):
            assert numbers(sessions["s"].tree.prompt(call_id)) == prompts[call_id]


def test_a_fork_stores_only_what_is_new() -> None:
    session = Session("s", POLICY)
    add(session, [7] * 1000, [1, 2])
    fork = add(session, [7] * 1000 + [1, 3, 4], [5])
    assert fork.parent is None and fork.base == 0
    assert numbers(fork.suffix) == [3, 4]


def test_a_retry_finds_the_undelivered_answer_of_its_own_kind() -> None:
    session = Session("s", POLICY)
    waiting = add(session, [1, 2], [3], delivered=False)
    assert session.undelivered(text_of([1, 2]), "", foreign=False) is waiting
    assert session.undelivered(text_of([1, 2]), "", foreign=True) is None
    assert session.undelivered(text_of([1, 2]), "forced", foreign=False) is None
    assert session.undelivered(text_of([1]), "", foreign=False) is None
    add(session, [1, 2, 3, 4], [5])  # the harness has seen [3]
    assert waiting.delivered
    assert session.undelivered(text_of([1, 2]), "", foreign=False) is None


def test_budget_and_tool_ids_survive_a_replay(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    session = Session("s", POLICY)
    node = add(session, [1], [2], delivered=False)
    node.answer = msgspec.structs.replace(ANSWER, tool_calls=(ToolCall(session.next_tool_id(), "bash", "{}"),))
    log = Journal(path)
    for record in (Opened("s", POLICY), Opened("gone", POLICY), Answered("s", node), Counted("s", "aborted")):
        log.append(record)
    log.append(Delivered("s", 0))
    log.append(Closed("gone"))
    restored = restore(journal.read(path))
    assert list(restored) == ["s"]
    assert restored["s"].next_tool_id() == session.next_tool_id()
    assert restored["s"].started == 2 and restored["s"].tree.nodes[0].delivered
    log.rewrite(restored["s"].records())
    log.append(Counted("s", "aborted"))
    log.close()
    trace = read_trace(path)
    assert trace.counters == {"aborted": 2} and trace.calls[0].delivered


@given(st.lists(st.integers(0, 300), max_size=6), st.lists(st.integers(0, 300), max_size=6))
def test_shared_prefix_ends_between_ids(one: list[int], other: list[int]) -> None:
    length = shared_prefix(text_of(one), text_of(other))
    assert text_of(one)[:length] == text_of(other)[:length]
    count = len(numbers(text_of(one)[:length]))
    assert one[:count] == other[:count]
    assert count == min(len(one), len(other)) or one[count] != other[count]


def test_of_equal_sequences_the_one_that_arrived_is_the_parent():
    """What was lost stays untrained, though the harness goes on from the same words."""
    session = Session("s", POLICY)
    add(session, [1, 2], [3])
    add(session, [1, 2], [3], delivered=False)
    child = add(session, [1, 2, 3, 4], [5])
    assert child.parent == 0
    assert [node.delivered for node in session.tree.nodes] == [True, False, True]

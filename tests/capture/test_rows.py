"""Rows: every trainable sampled token is supervised exactly once, whatever the tree looks like."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.capture.rows import rows
from pipeline.records import Call, PolicyVersion, Trace, VersionSpan

# A call: index of its parent (beyond the end: a root), prompt suffix length, sampled length, delivered, trainable.
SHAPES = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans()), max_size=12
)


def make_trace(shapes: list[tuple[int, int, int, bool, bool]]) -> Trace:
    """A trace in which every token of every suffix and sample has an id of its own, and a logprob that names it."""
    calls: list[Call] = []
    used = 0
    for index, (origin, suffix, sampled, delivered, trainable) in enumerate(shapes):
        parent = calls[origin] if origin < index else None
        history = np.concatenate([parent.prompt_ids, parent.sampled_ids]) if parent else np.zeros(0, np.int32)
        new = np.arange(used, used + suffix + sampled, dtype=np.int32)
        used += suffix + sampled
        calls.append(
            Call(
                call_id=index,
                parent=parent.call_id if parent else None,
                prompt_ids=np.concatenate([history, new[:suffix]]),
                sampled_ids=new[suffix:],
                logprobs=-new[suffix:].astype(np.float32),
                versions=(VersionSpan(PolicyVersion(0, 0), 0, sampled),),
                finish_reason="stop",
                delivered=delivered,
                trainable=trainable,
                tool_calls=0,
                malformed=False,
                seconds=0.0,
            )
        )
    return Trace("s", tuple(calls))


@given(SHAPES)
def test_every_trainable_token_is_supervised_once(shapes: list[tuple[int, int, int, bool, bool]]) -> None:
    trace = make_trace(shapes)
    built = rows(trace)
    trained = Counter(int(token) for row in built for token in row.input_ids[row.loss_mask])
    wanted = Counter(int(t) for call in trace.calls if call.delivered and call.trainable for t in call.sampled_ids)
    assert trained == wanted


@given(SHAPES)
def test_rows_are_paths_with_the_samplers_logprobs(shapes: list[tuple[int, int, int, bool, bool]]) -> None:
    trace = make_trace(shapes)
    sampled = {int(token) for call in trace.calls for token in call.sampled_ids}
    paths = [np.concatenate([call.prompt_ids, call.sampled_ids]).tolist() for call in trace.calls]
    for row in rows(trace):
        assert row.loss_mask[-1]
        assert any(path[: len(row.input_ids)] == row.input_ids.tolist() for path in paths)
        for token, logprob in zip(row.input_ids.tolist(), row.logprobs.tolist(), strict=True):
            assert logprob == (-token if token in sampled else 0)


@given(SHAPES)
def test_dropping_a_call_from_training_leaves_the_others_alone(shapes: list[tuple[int, int, int, bool, bool]]) -> None:
    trace = make_trace(shapes)
    for index in range(len(trace.calls)):
        masked = list(trace.calls)
        masked[index] = dataclasses.replace(masked[index], delivered=False)
        left = sum(row.trained_tokens for row in rows(dataclasses.replace(trace, calls=tuple(masked))))
        call = trace.calls[index]
        gone = len(call.sampled_ids) if call.delivered and call.trainable else 0
        assert left == sum(row.trained_tokens for row in rows(trace)) - gone


def test_a_fork_masks_the_shared_prefix_in_the_later_row() -> None:
    trace = make_trace([(9, 2, 3, True, True), (0, 1, 2, True, True), (0, 1, 1, True, True)])
    first, second = rows(trace)
    assert first.loss_mask.tolist() == [False, False, True, True, True, False, True, True]
    assert second.loss_mask.tolist() == [False] * 6 + [True]
    assert second.logprobs[2:5].tolist() == first.logprobs[2:5].tolist()


def test_a_call_that_does_not_extend_its_parent_is_refused() -> None:
    trace = make_trace([(9, 2, 2, True, True), (0, 1, 2, True, True)])
    broken = dataclasses.replace(trace.calls[1], prompt_ids=trace.calls[1].prompt_ids[::-1].copy())
    with pytest.raises(ValueError, match="call 0"):
        rows(Trace("s", (trace.calls[0], broken)))

"""A trace's training rows: root-to-leaf paths in which every trainable sampled token is supervised exactly once."""

from __future__ import annotations

import numpy as np

from pipeline.records import Call, Row, Trace


def rows(trace: Trace) -> tuple[Row, ...]:
    """One row a leaf, in the order of the calls, cut after its last trained token; no row where nothing is trained.

    Tokens of undelivered and untrainable calls are masked, and so is a shared prefix that an earlier row supervises.
    Raises ValueError when a call's prompt does not extend its parent's prompt + sampled ids.
    """
    parents = {call.parent for call in trace.calls}
    calls = {call.call_id: call for call in trace.calls}
    supervised: set[int] = set()
    built = []
    for call in trace.calls:
        if call.call_id not in parents:
            row = _row(_path(calls, call), supervised)
            built += [row] if row.trained_tokens else []
    return tuple(built)


def _path(calls: dict[int, Call], leaf: Call) -> list[Call]:
    """The calls from the root to a leaf."""
    path = [leaf]
    while (parent := path[-1].parent) is not None:
        path.append(calls[parent])
    return path[::-1]


def _row(path: list[Call], supervised: set[int]) -> Row:
    """The row of a path; adds to ``supervised`` the calls that it trains."""
    leaf = path[-1]
    ids = np.concatenate([leaf.prompt_ids, leaf.sampled_ids])
    mask = np.zeros(len(ids), bool)
    logprobs = np.zeros(len(ids), np.float32)
    for call in path:
        span = _span(call, ids)
        logprobs[span] = call.logprobs
        if call.trainable and call.delivered and call.call_id not in supervised:
            mask[span] = True
            supervised.add(call.call_id)
    end = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else 0
    return Row(ids[:end], mask[:end], logprobs[:end])


def _span(call: Call, ids: np.ndarray) -> slice:
    """Where a call's sampled ids stand in a descendant's sequence."""
    start, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.sampled_ids)
    if not (np.array_equal(ids[:start], call.prompt_ids) and np.array_equal(ids[start:end], call.sampled_ids)):
        raise ValueError(f"call {call.call_id} is no prefix of the row that should hold it")
    return slice(start, end)

"""Packed forests: every token on its path only, shared prefixes once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.training import prefix_tree
from pipeline.training.prefix_tree import Blocks, Forest, Growth, build_forest, lexicographic

# Two letters and a few lengths: rows that fork, repeat, extend and start each other are common.
ROWS = st.lists(st.lists(st.integers(5, 6), min_size=1, max_size=9), min_size=1, max_size=8)


def arrays(rows: list[list[int]]) -> list[np.ndarray]:
    return [np.array(row, np.int32) for row in rows]


def seen(calls: tuple[Blocks, ...], tokens: int) -> np.ndarray:
    """How often each token (rows) sees each other (columns)."""
    counts = np.zeros((tokens, tokens), int)
    for call in calls:
        for queries, keys in zip(call.queries, call.keys, strict=True):
            block = np.ones((queries.stop - queries.start, keys.stop - keys.start), int)
            counts[queries, keys] += np.tril(block) if call.causal else block
    return counts


def paths(forest: Forest) -> np.ndarray:
    """What each token must see: all before it in any row that it stands in."""
    expected = np.zeros((len(forest.input_ids),) * 2, int)
    for places in forest.places:
        for position, place in enumerate(places):
            expected[place] = 0
            expected[place, places[: position + 1]] = 1
    return expected


@pytest.mark.parametrize("least", [1, 2, 4, 32])
@settings(max_examples=60, deadline=None)
@given(rows=ROWS)
def test_every_row_is_there_and_every_token_sees_its_path_once(least: int, rows: list[list[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_tree, "LEAST_SHARED", least)
        forest = build_forest(arrays(rows))
    for row, places in zip(rows, forest.places, strict=True):
        assert forest.input_ids.numpy()[places].tolist() == row
        assert forest.position_ids.numpy()[places].tolist() == list(range(len(row)))
    np.testing.assert_array_equal(seen(forest.calls, len(forest.input_ids)), paths(forest))
    distinct = {tuple(row[:stop]) for row in rows for stop in range(1, len(row) + 1)}
    assert len(forest.input_ids) == len(distinct) if least == 1 else len(forest.input_ids) >= len(distinct)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS)
def test_no_token_is_a_query_twice_in_one_call(rows: list[list[int]]) -> None:
    """What flash attention for variable lengths demands, and adding up gradients by index too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_tree, "LEAST_SHARED", 1)
        calls = build_forest(arrays(rows)).calls
    for call in calls:
        for spans in (call.queries, call.keys):
            places = np.concatenate([np.arange(span.start, span.stop) for span in spans])
            assert len(places) == len(set(places.tolist()))


def test_a_short_common_start_is_not_shared() -> None:
    rows = arrays([[1] * 40 + [2], [1] * 40 + [3], [1] * 5 + [4]])
    forest = build_forest(rows)
    assert len(forest.input_ids) == 42 + 6
    assert len(forest.calls) == 2


def test_growth_counts_what_the_forest_holds() -> None:
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 9, 200)
    rows = [np.concatenate([trunk[:cut], rng.integers(0, 9, 20)]).astype(np.int32) for cut in (0, 10, 60, 75, 199, 200)]
    growth = Growth()
    shared = [growth.add(rows[index]) for index in lexicographic(rows)]
    assert growth.tokens == sum(map(len, rows)) - sum(shared) == len(build_forest(rows).input_ids)
    assert sum(shared) >= 60 + 75 + 199 - 2 * prefix_tree.LEAST_SHARED

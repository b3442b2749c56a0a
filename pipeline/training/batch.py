"""From closed groups to micro-batches: weighted rows, minibatches of whole groups, rows that share prefixes together.

Pure functions over records. Which micro-batch a row lands in never changes the loss, only its time and memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pipeline.config import AlgorithmConfig
from pipeline.records import PolicyVersion, RolloutRecord, Row, TrainGroup
from pipeline.training.loss_weights import token_weights, trained_tokens
from pipeline.training.prefix_tree import Blocks, Growth, build_forest, lexicographic

NO_CONTRAST = 1e-9  # advantages this small are rounding left over from equal rewards


@dataclass(frozen=True)
class WeightedRow:
    """A row with its rollout's advantage and the weight of one of its tokens in the step's loss.

    ``rollout`` numbers the rollouts of the step, so that a sum over all rows of one can be taken.
    """

    row: Row
    advantage: float
    weight: float
    comparable: bool
    rollout_id: str
    rollout: int

    def __len__(self) -> int:
        return len(self.row.input_ids)


@dataclass(frozen=True)
class Minibatch:
    """The rows of one optimizer step. ``groups`` and ``rollouts`` count what the denominators were taken over."""

    rows: tuple[WeightedRow, ...]
    groups: int
    rollouts: int


@dataclass(frozen=True)
class RowBatch:
    """Rows of one forward, packed as a forest of shared prefixes or side by side, padded on the right."""

    rows: tuple[WeightedRow, ...]
    packed: bool
    tokens: int  # that the model runs over
    filler: bool = False  # runs only so that every rank runs the same number of forwards; weighs nothing


@dataclass(frozen=True)
class MicroBatch:
    """A RowBatch as tensors. The ``tokens`` axis holds the trained tokens, row by row.

    ``predictors`` say where, in the flattened inputs, the token before each trained one stands; packed rows may share
    it. ``position_ids`` and the attention's ``calls`` are those of packed rows, None for padded ones.
    """

    input_ids: Int[Tensor, "rows length"]
    position_ids: Int[Tensor, "rows length"] | None
    predictors: Int[Tensor, "tokens"]
    targets: Int[Tensor, "tokens"]
    calls: tuple[Blocks, ...] | None
    behaviour: Float[Tensor, "tokens"]
    advantages: Float[Tensor, "tokens"]
    weights: Float[Tensor, "tokens"]
    comparable: Bool[Tensor, "tokens"]
    rollouts: Int[Tensor, "tokens"]
    filler: bool

    def to(self, device: torch.device) -> MicroBatch:
        """The same, on another device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)


def has_contrast(group: TrainGroup) -> bool:
    """Whether any advantage differs from zero."""
    return any(abs(advantage) > NO_CONTRAST for advantage in group.advantages)


def check_group(group: TrainGroup) -> None:
    """Raise ValueError for a record that cannot be trained on: unequal lengths, a trained first token."""
    if len(group.rollouts) != len(group.advantages):
        raise ValueError(f"group {group.group_id}: {len(group.rollouts)} rollouts, {len(group.advantages)} advantages")
    for rollout in group.rollouts:
        for row in rollout.rows:
            _check_row(rollout.rollout_id, row)


def _check_row(rollout_id: str, row: Row) -> None:
    lengths = {len(row.input_ids), len(row.loss_mask), len(row.logprobs)}
    if len(lengths) != 1:
        raise ValueError(f"rollout {rollout_id}: ids, mask and logprobs of a row differ in length: {sorted(lengths)}")
    if row.loss_mask[:1].any():
        raise ValueError(f"rollout {rollout_id}: the first token of a row cannot be trained, nothing predicts it")
    if not np.isfinite(row.logprobs[row.loss_mask]).all():
        raise ValueError(f"rollout {rollout_id}: a behaviour logprob is not finite")


def split_minibatches(groups: Sequence[TrainGroup], count: int) -> list[list[TrainGroup]]:
    """At most ``count`` lists of whole groups, close in tokens; the order of ``groups`` does not matter."""
    bins: list[list[TrainGroup]] = [[] for _ in range(min(count, len(groups)))]
    loads = [0] * len(bins)
    for group in sorted(groups, key=lambda group: (-_group_tokens(group), group.group_id)):
        lightest = loads.index(min(loads))
        bins[lightest].append(group)
        loads[lightest] += _group_tokens(group)
    return bins


def _group_tokens(group: TrainGroup) -> int:
    return sum(trained_tokens(rollout) for rollout in group.rollouts) or 1


def make_minibatch(
    groups: Sequence[TrainGroup], algorithm: AlgorithmConfig, current: PolicyVersion | None
) -> Minibatch:
    """Weigh the rows of one optimizer step. ``current`` is the trainer's version, None when it is not known."""
    rows: list[WeightedRow] = []
    rollouts = 0
    for group, weights in zip(groups, token_weights(groups, algorithm), strict=True):
        for rollout, advantage, weight in zip(group.rollouts, group.advantages, weights, strict=True):
            rows += _weighted_rows(rollout, advantage, weight, current, rollouts)
            rollouts += 1
    return Minibatch(tuple(rows), len(groups), rollouts)


def _weighted_rows(
    rollout: RolloutRecord, advantage: float, weight: float, current: PolicyVersion | None, number: int
) -> Iterable[WeightedRow]:
    comparable = current is None or rollout.version == rollout.newest_version == current
    for row in rollout.rows:
        if row.trained_tokens:
            yield WeightedRow(row, advantage, weight, comparable, rollout.rollout_id, number)


def plan(rows: Sequence[WeightedRow], token_budget: int, pack: bool, ranks: int = 1) -> list[list[RowBatch]]:
    """Part rows into forwards of at most ``token_budget`` tokens (a longer row alone), spread over ``ranks``.

    Packed rows behind a common prefix longer than half the budget may add as many tokens as it has: each forward runs
    it again. Every rank gets the same number, filled up with forwards that weigh nothing. Deterministic, so all ranks
    agree.
    """
    return _spread(_packed(rows, token_budget, ranks) if pack else _padded(rows, token_budget, ranks), ranks)


def _packed(rows: Sequence[WeightedRow], budget: int, ranks: int) -> list[RowBatch]:
    """Cut the rows' forest, in depth-first order, into forests under the budget."""
    ordered = [rows[index] for index in lexicographic([row.row.input_ids for row in rows])]
    whole = Growth()
    for row in ordered:
        whole.add(row.row.input_ids)
    batches: list[RowBatch] = []
    growth, pending, prefix = Growth(), list[WeightedRow](), 0
    for row in ordered:
        shared = growth.shared(row.row.input_ids)
        common = min(prefix, shared)
        limit = common + min(max(budget - common, common), -(-(whole.tokens - common) // ranks))
        if pending and growth.tokens + len(row) - shared > limit:
            batches.append(RowBatch(tuple(pending), True, growth.tokens))
            growth, pending = Growth(), []
        prefix = common if pending else len(row)
        growth.add(row.row.input_ids)
        pending.append(row)
    return [*batches, RowBatch(tuple(pending), True, growth.tokens)]


def _padded(rows: Sequence[WeightedRow], budget: int, ranks: int) -> list[RowBatch]:
    """Rows of like length together."""
    ordered = sorted(rows, key=len)
    share = -(-len(ordered) * len(ordered[-1]) // ranks)
    batches: list[RowBatch] = []
    pending: list[WeightedRow] = []
    for row in ordered:
        if pending and (len(pending) + 1) * len(row) > min(share, budget):
            batches.append(RowBatch(tuple(pending), False, len(pending) * len(pending[-1])))
            pending = []
        pending.append(row)
    return [*batches, RowBatch(tuple(pending), False, len(pending) * len(pending[-1]))]


def _spread(batches: Sequence[RowBatch], ranks: int) -> list[list[RowBatch]]:
    """Longest first to the least loaded rank; then fill up with the shortest forward, marked as filler."""
    assigned: list[list[RowBatch]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for batch in sorted(batches, key=lambda batch: -batch.tokens):
        rank = loads.index(min(loads))
        assigned[rank].append(batch)
        loads[rank] += batch.tokens
    filler = replace(min(batches, key=lambda batch: batch.tokens), filler=True)
    longest = max(map(len, assigned))
    return [own + [filler] * (longest - len(own)) for own in assigned]


def collate(batch: RowBatch, pad_id: int = 0) -> MicroBatch:
    """The tensors of a forward. Padding follows every real token, so no causal layer of any kind sees it."""
    rows = batch.rows
    layout = _pack([row.row.input_ids for row in rows]) if batch.packed else _pad(rows, pad_id)
    trained = [np.flatnonzero(row.row.loss_mask) for row in rows]
    counts = torch.tensor([len(own) for own in trained])
    return MicroBatch(
        input_ids=layout.input_ids,
        position_ids=layout.position_ids,
        predictors=_joined(places[own - 1] for places, own in zip(layout.places, trained, strict=True)),
        targets=_joined(row.row.input_ids[own].astype(np.int64) for row, own in zip(rows, trained, strict=True)),
        calls=layout.calls,
        behaviour=_joined(row.row.logprobs[own] for row, own in zip(rows, trained, strict=True)).float(),
        advantages=torch.tensor([row.advantage for row in rows]).repeat_interleave(counts),
        weights=torch.tensor([0.0 if batch.filler else row.weight for row in rows]).repeat_interleave(counts),
        comparable=torch.tensor([row.comparable for row in rows]).repeat_interleave(counts),
        rollouts=torch.tensor([row.rollout for row in rows]).repeat_interleave(counts),
        filler=batch.filler,
    )


@dataclass(frozen=True)
class _Layout:
    """Where each token of each row stands in the flattened inputs."""

    input_ids: Tensor
    position_ids: Tensor | None
    places: Sequence[np.ndarray]
    calls: tuple[Blocks, ...] | None


def _pack(rows: Sequence[np.ndarray]) -> _Layout:
    forest = build_forest(rows)
    return _Layout(forest.input_ids[None], forest.position_ids[None], forest.places, forest.calls)


def _pad(rows: Sequence[WeightedRow], pad_id: int) -> _Layout:
    length = max(map(len, rows))
    input_ids = torch.full((len(rows), length), pad_id, dtype=torch.long)
    for index, row in enumerate(rows):
        input_ids[index, : len(row)] = torch.from_numpy(row.row.input_ids.astype(np.int64))
    places = [np.arange(index * length, index * length + len(row)) for index, row in enumerate(rows)]
    return _Layout(input_ids, None, places, None)


def _joined(parts: Iterable[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(list(parts)))

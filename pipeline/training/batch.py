"""From closed groups to micro-batches: weighted rows, minibatches of whole groups, rows that share a prefix together.

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

NO_CONTRAST = 1e-9  # advantages this small are rounding left over from equal rewards
FORWARD_OVERHEAD = 256  # tokens: what one more forward costs beside its tokens, when deciding whether to part rows


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

    @property
    def first_trained(self) -> int:
        return int(self.row.loss_mask.argmax())


@dataclass(frozen=True)
class Minibatch:
    """The rows of one optimizer step. ``groups`` and ``rollouts`` count what the denominators were taken over."""

    rows: tuple[WeightedRow, ...]
    groups: int
    rollouts: int


@dataclass(frozen=True)
class RowBatch:
    """Rows of one forward. The first ``prefix`` ids are equal in all of them and hold no trained token."""

    rows: tuple[WeightedRow, ...]
    prefix: int
    filler: bool = False  # runs only so that every rank runs the same number of forwards; weighs nothing

    @property
    def padded_tokens(self) -> int:
        return len(self.rows) * (max(map(len, self.rows)) - self.prefix)

    @property
    def cost(self) -> int:
        """Tokens the model runs over."""
        return self.prefix + self.padded_tokens


@dataclass(frozen=True)
class MicroBatch:
    """A RowBatch as tensors. The ``tokens`` axis holds the trained tokens in row-major order."""

    prefix_ids: Int[Tensor, "1 prefix"]
    input_ids: Int[Tensor, "rows length"]
    trained: Bool[Tensor, "rows length"]
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


def plan(rows: Sequence[WeightedRow], token_budget: int, share_prefix: bool, ranks: int = 1) -> list[list[RowBatch]]:
    """Part rows into forwards of at most ``token_budget`` padded tokens (a longer row alone), spread over ``ranks``.

    Behind a prefix longer than the budget come as many tokens as it has: each forward runs it again, and a forward over
    it must fit anyway. Every rank gets the same number, filled up with forwards that weigh nothing. Deterministic, so
    all ranks agree.
    """
    clusters = _clusters(rows) if share_prefix else [(list(rows), 0)]
    total = sum(RowBatch(tuple(cluster), prefix).padded_tokens for cluster, prefix in clusters)
    share = -(-total // ranks)
    parted = (_fill(cluster, prefix, min(share, max(token_budget, prefix))) for cluster, prefix in clusters)
    return _spread([batch for own in parted for batch in own], ranks)


def _clusters(rows: Sequence[WeightedRow]) -> list[tuple[list[WeightedRow], int]]:
    """Rows with their shared prefix: neighbours in lexicographic order stay together while that saves tokens."""
    ordered = sorted(rows, key=lambda row: row.row.input_ids.astype(">u4").tobytes())
    clusters: list[tuple[list[WeightedRow], int]] = []
    for row in ordered:
        if clusters:
            merged = [*clusters[-1][0], row]
            prefix = min(clusters[-1][1], _common(clusters[-1][0][0], row), row.first_trained - 1)
            apart = RowBatch(tuple(clusters[-1][0]), clusters[-1][1]).cost + len(row) + FORWARD_OVERHEAD
            if RowBatch(tuple(merged), prefix).cost <= apart:
                clusters[-1] = (merged, prefix)
                continue
        clusters.append(([row], row.first_trained - 1))
    return clusters


def _common(left: WeightedRow, right: WeightedRow) -> int:
    """How many leading ids two rows share."""
    length = min(len(left), len(right))
    differ = left.row.input_ids[:length] != right.row.input_ids[:length]
    return int(differ.argmax()) if differ.any() else length


def _fill(rows: Sequence[WeightedRow], prefix: int, budget: int) -> list[RowBatch]:
    """Cut a cluster into forwards under the budget, rows of like length together."""
    batches: list[RowBatch] = []
    pending: list[WeightedRow] = []
    for row in sorted(rows, key=len):
        if pending and RowBatch((*pending, row), prefix).padded_tokens > budget:
            batches.append(RowBatch(tuple(pending), prefix))
            pending = []
        pending.append(row)
    return [*batches, RowBatch(tuple(pending), prefix)]


def _spread(batches: Sequence[RowBatch], ranks: int) -> list[list[RowBatch]]:
    """Longest first to the least loaded rank; then fill up with the cheapest forward, marked as filler."""
    assigned: list[list[RowBatch]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for batch in sorted(batches, key=lambda batch: -batch.cost):
        rank = loads.index(min(loads))
        assigned[rank].append(batch)
        loads[rank] += batch.cost
    filler = replace(min(batches, key=lambda batch: batch.cost), filler=True)
    longest = max(map(len, assigned))
    return [own + [filler] * (longest - len(own)) for own in assigned]


def collate(batch: RowBatch, pad_id: int = 0) -> MicroBatch:
    """Right-padded tensors: padding follows every real token, so no causal layer of any kind sees it."""
    rows, start = batch.rows, batch.prefix
    length = max(map(len, rows)) - start
    input_ids = torch.full((len(rows), length), pad_id, dtype=torch.long)
    trained = torch.zeros((len(rows), length), dtype=torch.bool)
    for index, row in enumerate(rows):
        input_ids[index, : len(row) - start] = torch.from_numpy(row.row.input_ids[start:].astype(np.int64))
        trained[index, : len(row) - start] = torch.from_numpy(row.row.loss_mask[start:].astype(np.bool_))
    counts = torch.tensor([row.row.trained_tokens for row in rows])
    return MicroBatch(
        prefix_ids=torch.from_numpy(rows[0].row.input_ids[:start].astype(np.int64))[None],
        input_ids=input_ids,
        trained=trained,
        behaviour=torch.from_numpy(np.concatenate([row.row.logprobs[row.row.loss_mask] for row in rows])).float(),
        advantages=torch.tensor([row.advantage for row in rows]).repeat_interleave(counts),
        weights=torch.tensor([0.0 if batch.filler else row.weight for row in rows]).repeat_interleave(counts),
        comparable=torch.tensor([row.comparable for row in rows]).repeat_interleave(counts),
        rollouts=torch.tensor([row.rollout for row in rows]).repeat_interleave(counts),
        filler=batch.filler,
    )

"""What each of four harnesses weighs in the loss, for rollouts of the shape that the reference experiment reports.

`python tests/training/harness_shares.py` prints the table of docs/loss.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from pipeline.config import AlgorithmConfig
from pipeline.records import Outcome, PolicyVersion, RolloutRecord, Row, TrainGroup, Verdict
from pipeline.training.loss_weights import AGGREGATIONS, token_weights, trained_tokens

GROUP_SIZE = 8
ROWS = {"opencode": 1, "claude-code": 8, "codex": 1, "mini-swe-agent": 1}  # a rollout; Claude Code rewrites its history
TOKENS = {"opencode": 183, "claude-code": 353, "codex": 311, "mini-swe-agent": 153}  # a rollout: the reported shares
REPORTED = {  # percent of rows and of supervised tokens in the reference's report
    "rows": {"opencode": 11.4, "claude-code": 77.3, "codex": 5.3, "mini-swe-agent": 5.9},
    "tokens": {"opencode": 18.3, "claude-code": 35.3, "codex": 31.1, "mini-swe-agent": 15.3},
}


def shaped_groups(seed: int, groups_per_harness: int = 3) -> list[TrainGroup]:
    """As many groups of each harness; rollouts of a group differ in length, on average TOKENS in ROWS rows."""
    rng = np.random.default_rng(seed)
    return [
        TrainGroup(f"{harness}/{number}", harness, _rollouts(harness, f"{harness}/{number}", rng), (0.0,) * GROUP_SIZE)
        for harness in ROWS
        for number in range(groups_per_harness)
    ]


def _rollouts(harness: str, group_id: str, rng: np.random.Generator) -> tuple[RolloutRecord, ...]:
    lengths = TOKENS[harness] + rng.permutation(np.linspace(-100, 100, GROUP_SIZE)).astype(int)
    return tuple(_rollout(harness, group_id, index, int(length)) for index, length in enumerate(lengths))


def _rollout(harness: str, group_id: str, index: int, tokens: int) -> RolloutRecord:
    parts = np.array_split(np.arange(tokens), ROWS[harness])
    return RolloutRecord(
        rollout_id=f"{group_id}/{index}",
        group_id=group_id,
        index=index,
        task_id="task",
        harness=harness,
        outcome=Outcome.SOLVED,
        verdict=Verdict(1.0, 1.0, 1),
        rows=tuple(_row(len(part)) for part in parts),
        version=PolicyVersion(0, 0),
        newest_version=PolicyVersion(0, 0),
        calls=1,
        malformed=0,
        undelivered=0,
        prompt_tokens=1,
        sampled_tokens=tokens,
        wall_s=1.0,
    )


def _row(tokens: int) -> Row:
    mask = np.arange(tokens + 1) > 0
    return Row(np.ones(tokens + 1, np.int32), mask, np.zeros(tokens + 1, np.float32))


def loss_shares(groups: list[TrainGroup], aggregation: str) -> dict[str, float]:
    """Percent of Σ w over all trained tokens that each harness has; ``row_mean`` is what trainers of rows do."""
    weights: defaultdict[str, float] = defaultdict(float)
    if aggregation == "row_mean":
        for group in groups:
            weights[group.harness] += sum(len(rollout.rows) for rollout in group.rollouts)
        return _percent(weights)
    for group, own in zip(groups, token_weights(groups, AlgorithmConfig(aggregation=aggregation)), strict=True):
        for rollout, weight in zip(group.rollouts, own, strict=True):
            weights[group.harness] += weight * trained_tokens(rollout)
    return _percent(weights)


def _percent(weights: Mapping[str, float]) -> dict[str, float]:
    return {harness: 100 * weight / sum(weights.values()) for harness, weight in weights.items()}


def table() -> str:
    """The shares as Markdown."""
    lines = ["| what weighs the same | " + " | ".join(ROWS) + " |", "|---" * (len(ROWS) + 1) + "|"]
    for aggregation in ("row_mean", *AGGREGATIONS):
        shares = loss_shares(shaped_groups(0), aggregation)
        lines.append(f"| `{aggregation}` | " + " | ".join(f"{shares[harness]:.1f}" for harness in ROWS) + " |")
    for name, shares in REPORTED.items():
        lines.append(f"| the reference, by {name} | " + " | ".join(f"{shares[harness]}" for harness in ROWS) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())

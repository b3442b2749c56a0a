"""Groups around rows that a benchmark made or sampled, as the trainer takes them."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.records import Outcome, PolicyVersion, RolloutRecord, Row, TrainGroup, Verdict

VERSION = PolicyVersion(0, 0)


def group_of(name: str, rows: Sequence[Row], advantages: Sequence[float]) -> TrainGroup:
    """One rollout of one row each."""
    rollouts = tuple(_rollout(name, index, row) for index, row in enumerate(rows))
    return TrainGroup(name, "bench", rollouts, tuple(advantages))


def _rollout(group: str, index: int, row: Row) -> RolloutRecord:
    return RolloutRecord(
        rollout_id=f"{group}/{index}",
        group_id=group,
        index=index,
        task_id="task",
        harness="bench",
        outcome=Outcome.SOLVED,
        verdict=Verdict(1.0, 1.0, 0),
        rows=(row,),
        version=VERSION,
        newest_version=VERSION,
        calls=1,
        malformed=0,
        undelivered=0,
        prompt_tokens=len(row.input_ids) - row.trained_tokens,
        sampled_tokens=row.trained_tokens,
        wall_s=1.0,
    )

"""A rollout with the few fields that reports look at."""

from __future__ import annotations

import numpy as np

from pipeline.records import Outcome, PolicyVersion, RolloutRecord, Row, Verdict


def make_rollout(
    task: str = "t0",
    harness: str = "pi",
    passed: bool | None = True,
    *,
    index: int = 0,
    group: str = "g0",
    reward: float | None = None,
    tool_calls: int = 1,
    calls: int = 2,
    malformed: int = 0,
    rows: tuple[int, ...] = (),
    version: int = 0,
) -> RolloutRecord:
    """``passed`` None: ungraded. ``rows``: trained tokens of each row. ``reward`` defaults to the correctness."""
    correctness = None if passed is None else float(passed)
    return RolloutRecord(
        rollout_id=f"{group}-{task}-{harness}-{index}",
        group_id=group,
        index=index,
        task_id=task,
        harness=harness,
        outcome=Outcome.INFRASTRUCTURE if passed is None else Outcome.SOLVED if passed else Outcome.UNSOLVED,
        verdict=Verdict(correctness if reward is None else reward, correctness, tool_calls),
        rows=tuple(Row(np.zeros(n + 3, np.int32), np.arange(n + 3) >= 3, np.zeros(n + 3, np.float32)) for n in rows),
        version=PolicyVersion(0, version),
        newest_version=PolicyVersion(0, version),
        calls=calls,
        malformed=malformed,
        undelivered=0,
        prompt_tokens=10,
        sampled_tokens=5,
        wall_s=2.0,
    )

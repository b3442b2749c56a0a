"""The rollout that the packing benchmark makes up."""

from __future__ import annotations

from bench.packing import forking_rollout
from pipeline.training.batch import plan


def test_the_rollout_forks_and_trains_each_answer_once() -> None:
    rows = forking_rollout(3_072)
    assert len(rows) == 8
    (packed,) = plan(rows, 40_960, True)
    assert [len(batch.rows) for batch in packed] == [8]
    assert packed[0].tokens < sum(map(len, rows)) / 3
    answers = [row.row.input_ids[:place].tobytes() for row in rows for place in row.row.loss_mask.nonzero()[0]]
    assert len(answers) == len(set(answers)) > 0

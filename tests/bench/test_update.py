"""The two loops of the update's benchmark do the same work."""

from __future__ import annotations

from pathlib import Path

from bench.packing import model
from bench.update import Rivals, Work


def test_both_loops_move_the_weights_alike(tmp_path: Path) -> None:
    work = Work(vocabulary=97, length=128, groups=3, rows_per_forward=2)
    model(work.vocabulary, hidden=32, layers=1).save_pretrained(tmp_path)
    rivals = Rivals(tmp_path, work)
    assert [len(batches) for batches in rivals.steps] == [2, 2, 2]
    assert all(len(batch.rows) == 2 for batches in rivals.steps for batch in batches)
    before = rivals.trainer.policy.model.get_input_embeddings().weight.detach().clone()
    rivals.yoke()
    moved = (rivals.trainer.policy.model.get_input_embeddings().weight - before).norm() / before.norm()
    assert rivals.difference() > 0.1 * moved
    rivals.by_hand()
    assert rivals.difference() < 0.01 * moved

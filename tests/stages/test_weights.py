"""Which weights a word means."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import UserError
from pipeline.stages.weights import exported, kept, select, update_of
from pipeline.training.checkpoint import write_atomically

FIRST, SECOND, AGAIN = "000001-update-000002", "000002-update-000004", "0002-000003-update-000004"


def make(*places: Path) -> None:
    for place in places:
        write_atomically(place, lambda draft: (draft / "x").write_text("") and None)


def test_exports_and_checkpoints_count_once_and_half_written_ones_do_not(tmp_path: Path) -> None:
    checkpoints, models = tmp_path / "checkpoints", tmp_path / "models"
    assert kept(checkpoints, models) == []
    make(models / FIRST, models / SECOND, checkpoints / SECOND)
    (models / ".partial-x").mkdir()
    (models / "000009-update-000018").mkdir()  # without a manifest
    make(models / "mine")
    assert exported(models) == kept(checkpoints, models) == [FIRST, SECOND]


def test_words_for_weights() -> None:
    names = [FIRST, SECOND, AGAIN]
    assert select("newest", names) == [AGAIN] and select("all", names) == names
    assert select(FIRST, names) == [FIRST]
    assert select("4", names) == [AGAIN], "after a rollback the newer one of an update counts"
    assert select("base", names) == select("newest", []) == ["base"]
    for wrong in ("5", "model", "update-000004"):
        with pytest.raises(
            UserError, match=f"stage.checkpoint={wrong} is none of newest, all, base; kept are: {FIRST}"
        ):
            select(wrong, names)
    with pytest.raises(UserError, match="no checkpoint yet"):
        select("all", [])


def test_updates_of_names() -> None:
    assert [update_of(name) for name in (FIRST, AGAIN, "base", "again-0")] == [2, 4, 0, None]

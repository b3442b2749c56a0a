"""Cells of an evaluation: the first grade of a rollout stands, whoever writes when."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.records import GroupSpec, Outcome, PolicyVersion, RolloutRecord, TaskRef, Verdict
from pipeline.stages import evaluation
from pipeline.stages.evaluation import Cells, read_cell, write_cell

SPEC = GroupSpec("pi--t.2", TaskRef("t.2", Path("/tasks/t.2")), "pi", 0, 2)


def rollout(index: int, correctness: float | None, attempt: int = 1) -> RolloutRecord:
    version = PolicyVersion(attempt, 0)
    outcome = Outcome.INFRASTRUCTURE if correctness is None else Outcome.SOLVED
    verdict = Verdict(None, correctness, 1, "")
    return RolloutRecord(
        f"r{index}", SPEC.group_id, index, "t.2", "pi", outcome, verdict, (), version, version, 2, 0, 0, 4, 2, 1.0, {}
    )


def grades(path: Path) -> list[float | None]:
    return [record.verdict.correctness for record in read_cell(path)]


def test_tries_add_up(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "before", [SPEC], retries=1)
    work = cells.lease("node0")
    assert work is not None and work["indices"] == [0, 1]
    first = [rollout(0, 1.0), rollout(1, None)]
    write_cell(Path(work["path"]), first)
    cells.close(work, first)
    again = cells.lease("node0")
    assert again is not None and again["indices"] == [1], "what is graded is not tried again"
    second = [rollout(1, 0.0)]
    write_cell(Path(again["path"]), second)
    cells.close(again, second)
    assert cells.done and cells.coverage().complete
    assert grades(Path(work["path"])) == [1.0, 0.0]
    assert Cells(tmp_path / "before", [SPEC], 1).done, "an interrupted evaluation goes on where it was"
    assert len(list((tmp_path / "before").glob("*.parquet"))) == 1, "one such file a cell, for those who count them"


def test_tries_are_bounded(tmp_path: Path) -> None:
    cells = Cells(tmp_path, [SPEC], retries=1)
    for _ in range(2):
        work = cells.lease("node0")
        assert work is not None
        cells.close(work, [rollout(0, None), rollout(1, None)])
    assert cells.done and not cells.coverage().graded


def test_a_ghost_s_late_write_replaces_no_grade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped between its last look at the cell and its write; the newer attempt grades the cell meanwhile."""
    path = tmp_path / "cell.parquet"
    write = evaluation.write_new_group

    def overtaken(place: Path, records: list[RolloutRecord]) -> bool:
        monkeypatch.setattr(evaluation, "write_new_group", write)
        write_cell(path, [rollout(0, 1.0, attempt=2), rollout(1, None, attempt=2)])
        return write(place, records)

    monkeypatch.setattr(evaluation, "write_new_group", overtaken)
    write_cell(path, [rollout(0, 0.0), rollout(1, 0.0)])
    assert grades(path) == [1.0, 0.0]
    assert [record.version.attempt for record in read_cell(path)] == [2, 1]


def test_a_lost_answer_of_the_file_server_is_seen_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS may make the link, lose the answer, ask again and then say that it is there already."""
    link = evaluation.os.link

    def twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr("os.link", twice)
    write_cell(tmp_path / "cell.parquet", [replace(rollout(0, 1.0))])
    assert [path.name for path in tmp_path.iterdir()] == ["cell.parquet"]

"""Rollouts of earlier attempts: the newest usable one is taken, and looking costs nothing once it was looked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.launch.kept import KeptRollouts, group_name, rollout_name
from pipeline.launch.run_directory import RunDirectory
from pipeline.records import GroupSpec, Outcome, PolicyVersion, RolloutRecord, TaskRef, Verdict
from pipeline.report.store import write_group

SPEC = GroupSpec("g000000", TaskRef("t0", Path("t0")), "pi", 0, 2)
WORK = {"keep_from": 3, "lineage": [[1, 0], [2, 4], [3, 4]]}  # attempt 1 reached 5, the others went on from 4


def record(index: int, version: PolicyVersion, graded: bool = True, calls: int = 1) -> RolloutRecord:
    outcome = Outcome.SOLVED if graded else Outcome.INFRASTRUCTURE
    verdict = Verdict(None, 1.0 if graded else None, 1)
    return RolloutRecord(
        f"r{index}", SPEC.group_id, index, "t0", "pi", outcome, verdict, (), version, version, calls, 0, 0, 1, 1, 1.0
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Three attempts, the last of which is on."""
    run = RunDirectory(tmp_path)
    for _ in range(3):
        run.new_attempt()
    return run


def find(run: RunDirectory, index: int = 0) -> RolloutRecord | None:
    return KeptRollouts(run.attempt(3)).find(SPEC, index, WORK)


def keep(run: RunDirectory, attempt: int, *records: RolloutRecord, group: bool = False) -> None:
    place = run.attempt(attempt)
    name = group_name(SPEC) if group else rollout_name(SPEC, records[0].index)
    write_group((place.groups if group else place.rollouts) / name, records)


def test_nothing_is_found_where_nothing_was_kept(run: RunDirectory) -> None:
    keep(run, 3, record(0, PolicyVersion(3, 4)))
    assert find(run) is None, "the present attempt's own are no earlier ones"


def test_the_newest_attempt_speaks_first_in_files_of_rollouts_and_of_groups(run: RunDirectory) -> None:
    keep(run, 1, record(0, PolicyVersion(1, 4), calls=1))
    keep(run, 2, record(0, PolicyVersion(2, 4), calls=2), record(1, PolicyVersion(2, 4), calls=3), group=True)
    found = [find(run, index) for index in (0, 1)]
    assert [one.calls for one in found if one] == [2, 3]


@pytest.mark.parametrize("version", [PolicyVersion(1, 2), PolicyVersion(1, 5), PolicyVersion(2, 5)])
def test_what_is_too_old_or_of_other_weights_is_passed_over(run: RunDirectory, version: PolicyVersion) -> None:
    keep(run, 1, record(0, PolicyVersion(1, 3), calls=7))
    keep(run, 2, record(0, version))
    found = find(run)
    assert found is not None and found.calls == 7


def test_ungraded_ones_are_rolled_out_again(run: RunDirectory) -> None:
    keep(run, 2, record(0, PolicyVersion(2, 4), graded=False))
    assert find(run) is None


def test_earlier_attempts_are_looked_at_once(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(run, 2, record(0, PolicyVersion(2, 4)), record(1, PolicyVersion(2, 4)), group=True)
    kept = KeptRollouts(run.attempt(3))
    looks: list[str] = []
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, pattern: looks.append(self.name) or glob(self, pattern))
    for number in range(20):
        assert (kept.find(replace(SPEC, group_id=f"g{number:06d}"), 1, WORK) is None) == (number > 0)
    assert sorted(looks) == ["groups", "groups", "rollouts", "rollouts"], "two directories of two attempts"


def test_what_went_since_it_was_listed_is_passed_over(run: RunDirectory) -> None:
    """A ghost that was asleep goes on with closing its group: its rollouts' own files go."""
    keep(run, 1, record(0, PolicyVersion(1, 4), calls=1))
    keep(run, 2, record(0, PolicyVersion(2, 4), calls=2))
    kept = KeptRollouts(run.attempt(3))
    assert kept._files
    (run.attempt(2).rollouts / rollout_name(SPEC, 0)).unlink()
    found = kept.find(SPEC, 0, WORK)
    assert found and found.calls == 1

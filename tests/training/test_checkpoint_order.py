"""The order of checkpoints, with ghosts of dead attempts that go on writing and pruning at any moment."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.launch.run_directory import FencedOff
from pipeline.training import checkpoint

KEEP = 2
ACTIONS = st.sampled_from(["start", "save", "prune", "begin"])


class Run:
    """Attempts that all write under one root: each but the newest is a ghost. Only bytes, no trainer."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.attempts = 1
        self.last: dict[int, str] = {}  # attempt → its newest checkpoint

    def start(self, _: int) -> None:
        self.attempts += 1

    def begin(self, attempt: int) -> Path:
        partial = checkpoint.partial_path(self.root / checkpoint.next_name(self.root, 3, attempt))
        partial.mkdir(parents=True)
        (partial / "state.json").write_text(json.dumps({"attempt": attempt}))
        return partial

    def save(self, attempt: int) -> None:
        target = self.root / checkpoint.next_name(self.root, 3, attempt)
        checkpoint.publish(self.begin(attempt), target)
        self.last[attempt] = target.name

    def prune(self, attempt: int) -> None:
        before = set(self.root.glob(f"{checkpoint.PARTIAL}*"))
        checkpoint.prune(self.root, KEEP, attempt)
        for gone in before - set(self.root.glob(f"{checkpoint.PARTIAL}*")):
            assert int(gone.name.removeprefix(checkpoint.PARTIAL)[:4]) <= attempt, "a newer attempt was writing this"


@settings(deadline=None)
@given(st.lists(st.tuples(ACTIONS, st.integers(0, 5)), max_size=30))
def test_the_newest_attempt_s_last_checkpoint_always_wins(steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder, patch("os.fsync"):
        run = Run(Path(folder))
        for action, back in steps:
            getattr(run, action)(max(1, run.attempts - back))
            newest = checkpoint.newest(run.root)
            assert (newest.name if newest else None) == run.last.get(max(run.last, default=0))


def test_names_without_an_attempt_come_first(tmp_path: Path) -> None:
    for name in ("000009-update-000004", "0001-000002-update-000001", "0010-000001-update-000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / checkpoint.MANIFEST).write_text('{"files": {}}')
    assert [path.name[:4] for path in checkpoint.checkpoints(tmp_path)] == ["0000", "0001", "0010"]
    assert checkpoint.next_name(tmp_path, 5, 10) == "0010-000010-update-000005"


def test_a_ghost_that_slept_while_it_wrote_does_not_publish(tmp_path: Path) -> None:
    def fence() -> None:
        assert list(tmp_path.glob(f"{checkpoint.PARTIAL}*/{checkpoint.MANIFEST}")), "asked when all is written"
        raise FencedOff("a newer attempt has taken over")

    run = Run(tmp_path)
    with pytest.raises(FencedOff):
        checkpoint.publish(run.begin(1), tmp_path / "0001-000001-update-000003", fence)
    assert checkpoint.newest(tmp_path) is None

"""What goes and what stays when `storage` says so: in which order, whatever is killed, and never by a ghost."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from evaluation_helpers import export, graded, settings

from pipeline.config import Config, StorageConfig
from pipeline.launch import retention as module
from pipeline.launch.kept import KeptRollouts
from pipeline.launch.report_page import TrainedGroups
from pipeline.launch.retention import QuotaReached, Retention, old_groups, set_apart, sizes
from pipeline.launch.run_directory import Attempt, FencedOff, RunDirectory, discard, sweep_discarded
from pipeline.launch.storage import Storage
from pipeline.records import Row
from pipeline.report.rollout_view import NoVocabulary
from pipeline.report.store import read_figures, read_group, write_group
from pipeline.stages.flow import FlowState
from pipeline.training.checkpoint import checkpoints, write_atomically

GB = 1e9
TOKENS = 20_000  # of a rollout: random, so that nothing compresses them
FILLER = 300_000  # bytes of an export or a checkpoint


def ended(updates: int) -> dict[str, list[str]]:
    """Two groups an update, one of them trained, and a skipped one behind it."""
    return {
        name: how
        for update in range(updates)
        for name, how in (
            (f"t{update}", ["trained", f"update {update}"]),
            (f"s{update}", ["skipped", "no contrast"]),
        )
    }


@cache
def configured() -> Config:
    return settings(Path("/nowhere"), "training.updates=6", "training.checkpoint_every=2")


class Run:
    """Six updates, a checkpoint after each second one, two of them kept, three exports; one group has not ended."""

    def __init__(self, root: Path, like: Path | None = None) -> None:
        """``like``: of another one, which is copied."""
        self.config = replace(configured(), run_dir=str(root))
        self.run = RunDirectory(root)
        self.said: list[tuple[str, str]] = []
        if like is None:
            self.make()
        else:
            shutil.copytree(like, root)
        self.attempts = [self.run.attempt(number) for number in (1, 2)]

    def make(self) -> None:
        attempts = [self.run.new_attempt(), self.run.new_attempt()]
        self.run.save_config(self.config)
        rng = np.random.default_rng(0)
        for number, name in enumerate([*ended(6), "open"]):
            self.group(attempts[number % 2], name, rng)
        for update in (4, 6):
            self.checkpoint(update)
        for update in (2, 4, 6):
            export(self.run.models / f"00000{update // 2}-update-00000{update}")
            (self.run.models / f"00000{update // 2}-update-00000{update}" / "filler").write_bytes(b"x" * FILLER)

    def group(self, attempt: Attempt, name: str, rng: np.random.Generator) -> None:
        ids = rng.integers(0, 1 << 30, TOKENS).astype(np.int32)
        row = Row(ids, np.ones(TOKENS, bool), rng.random(TOKENS).astype(np.float32))
        records = [replace(graded("task", "pi", index), group_id=name, rows=(row,)) for index in range(2)]
        write_group(attempt.groups / f"{name}.parquet", records)

    def checkpoint(self, update: int) -> None:
        state = {"state": {"flow": FlowState(update=update, ended=ended(update)).to_json()}}

        def write(place: Path) -> None:
            (place / "state.json").write_text(json.dumps(state))
            (place / "filler").write_bytes(b"x" * FILLER)

        write_atomically(self.run.checkpoints / f"0002-00000{update // 2}-update-00000{update}", write)

    def look(self, rollouts: int | None = None, quota: float | None = None, attempt: int = -1, **training: int) -> None:
        """``quota`` in bytes."""
        storage = StorageConfig(rollouts, quota and quota / GB)
        config = replace(self.config, storage=storage, training=replace(self.config.training, **training))
        own = Storage(self.attempts[attempt], 1.0)
        Retention(config, self.run, own, lambda *it: self.said.append(it)).look()

    @property
    def whole(self) -> set[str]:
        return {path.stem for path in self.run.attempts.glob("*/groups/[!.]*.parquet")}

    @property
    def thinned(self) -> set[str]:
        return {path.stem for path in self.run.attempts.glob("*/figures/[!.]*.parquet")}

    @property
    def exports(self) -> list[int]:
        return sorted(int(path.name[-1]) for path in self.run.models.glob("[!.]*"))

    @property
    def kept(self) -> list[int]:
        return [int(path.name[-1]) for path in checkpoints(self.run.checkpoints)]

    @property
    def size(self) -> int:
        return sum(sizes(self.run).values())

    def figures(self) -> list[tuple[str, str, float | None]]:
        found = TrainedGroups(self.config, self.run).figures
        return sorted((record.group_id, record.rollout_id, record.verdict.correctness) for _, record in found)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Run(tmp_path_factory.mktemp("made") / "run").run.root


@pytest.fixture
def run(tmp_path: Path, made: Path) -> Run:
    return Run(tmp_path / "run", like=made)


# --- rollouts


def test_groups_are_old_by_the_updates_behind_them() -> None:
    flow = FlowState(update=4, ended={"abandoned": ["abandoned", "x"], **ended(4)})
    assert old_groups(flow, 0) == {"abandoned", *ended(4)}
    assert old_groups(flow, 3) == {"abandoned", "t0", "s0"}
    assert old_groups(flow, 4) == old_groups(flow, 99) == set()


def test_by_default_nothing_goes_and_the_size_is_told(run: Run) -> None:
    before = run.whole, run.exports, run.kept
    run.look()
    assert (run.whole, run.exports, run.kept) == before and run.said == []
    told = json.loads(run.run.size.read_text())
    assert told["quota_gb"] is None and told["bytes"] == sum(told["parts"].values()) > 3 * FILLER
    assert told["parts"]["checkpoints"] > 2 * FILLER and told["parts"]["rollouts"] > 10 * TOKENS


def test_only_tokens_go_of_groups_that_no_kept_checkpoint_needs(run: Run) -> None:
    figures = run.figures()
    run.look(rollouts=0)
    assert run.thinned == set(ended(4)), "ended in the older one of the two checkpoints"
    assert run.whole == {*ended(6), "open"} - set(ended(4))
    assert run.figures() == figures, "the report counts what it counted"
    for path in run.run.attempts.glob("*/figures/*.parquet"):
        assert all(record.rows == () for record in read_group(path))
        assert path.stat().st_size < TOKENS
    run.look(rollouts=0)
    assert run.thinned == set(ended(4))


def test_the_last_updates_stay(run: Run) -> None:
    run.look(rollouts=3)
    assert run.thinned == {"t0", "s0"}


def test_single_rollouts_of_earlier_attempts_go_with_their_groups(run: Run) -> None:
    records = read_figures(run.attempts[0].groups / "t0.parquet")
    for attempt, name in ((0, "t0-1"), (0, "open-0"), (1, "t1-0")):
        write_group(run.attempts[attempt].rollouts / f"{name}.parquet", records[:1])
    run.look(rollouts=0)
    left = sorted(path.stem for path in run.run.attempts.glob("*/rollouts/*.parquet"))
    assert left == ["open-0", "t1-0"], "this attempt's own are its engines' affair"


def test_without_a_checkpoint_nothing_is_old(run: Run) -> None:
    for place in checkpoints(run.run.checkpoints):
        discard(place)
    run.look(rollouts=0)
    assert run.thinned == set()


def test_a_thinned_group_is_never_taken_for_a_kept_rollout(run: Run) -> None:
    run.look(rollouts=0)
    kept = KeptRollouts(run.run.new_attempt())
    assert "open.parquet" in kept._files and "t0.parquet" not in kept._files


def test_the_viewer_shows_rollouts_that_have_tokens(run: Run) -> None:
    run.look(rollouts=0)
    views = list(TrainedGroups(run.config, run.run).views(NoVocabulary()))
    assert views and len(views) <= 2 * len(run.whole)


# --- exports and the quota


def test_exports_of_every_kth_update_are_held() -> None:
    names = [f"000001-update-{update:06d}" for update in (50, 100, 150, 200)]
    assert set_apart(names, (), 0) == names
    assert set_apart(names, (), 100) == [names[0], names[2]]
    assert set_apart(names, [names[0]], 100) == [names[2]]


def test_over_the_quota_exports_go_first_then_tokens_then_checkpoints(run: Run) -> None:
    run.checkpoint(2)
    run.config = replace(run.config, training=replace(run.config.training, keep_checkpoints=9))
    full, groups = run.size, run.whole
    run.look(quota=full - 1)
    assert (run.exports, run.whole, run.kept) == ([4, 6], groups, [2, 4, 6]), "one export is enough"
    assert "of old files went" in run.said[-2][1] and "of storage.quota_gb=" in run.said[-1][1]
    run.look(quota=run.size - FILLER - 5000)
    assert run.exports == [6] and run.kept == [2, 4, 6]
    assert run.thinned and run.thinned < set(ended(2)), "no more than is needed, oldest first"
    tokens = sum(path.stat().st_size for path in run.run.attempts.glob("*/groups/[st][01].parquet"))
    run.look(quota=run.size - tokens - 1)
    assert (run.exports, run.thinned, run.kept) == ([6], set(ended(2)), [4, 6])


def test_what_is_still_needed_is_not_touched_and_the_run_stops_in_one_line(run: Run) -> None:
    with pytest.raises(QuotaReached) as stopped:
        run.look(quota=1000.0, keep_every=2)
    assert "\n" not in str(stopped.value) and "over storage.quota_gb=1e-06 (" in str(stopped.value)
    assert "the same command goes on" in str(stopped.value)
    assert (run.exports, run.kept) == ([2, 4, 6], [4, 6]), "keep_every holds them; two checkpoints always stay"
    assert run.whole == {*ended(6), "open"} - set(ended(4))
    assert json.loads(run.run.size.read_text())["bytes"] == pytest.approx(run.size, rel=0.1)


def test_from_four_fifths_on_there_is_a_warning(run: Run) -> None:
    run.look(quota=run.size / 0.79)
    assert run.said == []
    run.look(quota=run.size / 0.85)
    assert [kind for kind, _ in run.said] == ["error"] and "85% of storage.quota_gb=" in run.said[0][1]
    assert run.exports == [2, 4, 6]


# --- kills, ghosts, troubles


class Killed(BaseException):
    pass


def killing(monkeypatch: pytest.MonkeyPatch, at: int) -> Callable[[], int]:
    """Every change of a directory counts; at number ``at`` the process is gone before it. Returns the count."""
    count = 0

    def counted(change: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            nonlocal count
            count += 1
            if count >= at:  # what runs on the way out does nothing either
                raise Killed
            return change(*arguments, **named)

        return call

    for name in ("replace", "rename", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    return lambda: count


def test_killed_before_any_step_nothing_is_lost_and_the_next_look_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.TOKENS", 50)
    monkeypatch.setattr(f"{__name__}.FILLER", 500)
    like = Run(tmp_path / "like").run.root
    reference = Run(tmp_path / "reference", like)
    figures = reference.figures()
    with monkeypatch.context() as patch, pytest.raises(QuotaReached):
        count = killing(patch, 10**9)
        reference.look(rollouts=0, quota=1.0)
    steps = count()
    assert steps > 20
    for at in range(1, steps + 1, 3):
        run = Run(tmp_path / f"killed-{at}", like)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            killing(patch, at)
            run.look(rollouts=0, quota=1.0)
        assert run.figures() == figures, at
        assert all(len(read_group(path)[0].rows) == 1 for path in run.run.attempts.glob("*/groups/[!.]*.parquet"))
        with pytest.raises(QuotaReached):
            run.look(rollouts=0, quota=1.0)
        assert (run.figures(), run.whole, run.thinned) == (figures, reference.whole, reference.thinned), at
        assert (run.exports, run.kept) == (reference.exports, reference.kept), at
        assert not list(run.run.models.glob(".gone-*"))


def test_a_ghost_removes_nothing(run: Run) -> None:
    before = run.size
    with pytest.raises(FencedOff):
        run.look(rollouts=0, quota=1.0, attempt=0)
    assert run.size == before and not run.run.size.exists()


def test_one_that_becomes_a_ghost_on_the_way_stops_at_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    thin = module.thin

    def overtaken(path: Path) -> None:
        thin(path)
        run.run.new_attempt()

    monkeypatch.setattr(module, "thin", overtaken)
    with pytest.raises(FencedOff):
        run.look(rollouts=0)
    assert len(run.thinned) == 1


def test_what_the_disk_refuses_is_an_alarm_and_no_end(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(module, "thin", refused)
    run.look(rollouts=0)
    assert run.said == [("error", "ALARM: old files of the run could not be removed: not yours")]


def test_a_discarded_directory_is_gone_under_its_name_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "rmdir", lambda *_, **__: (_ for _ in ()).throw(OSError("busy")))
        discard(tmp_path / "x")
    assert [path.name[:7] for path in tmp_path.iterdir()] == [".gone-x"]
    sweep_discarded(tmp_path)
    assert not list(tmp_path.iterdir())
    discard(tmp_path / "never")

"""The engine rank beside a file system that hangs or spoils rollouts: heartbeats go on, no group is lost."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from test_set_aside import Harness, rollout
from waiting import LONG_S, wait_for

from pipeline.config import UserError
from pipeline.launch import engine_rank as engine_module
from pipeline.launch import storage as storage_module
from pipeline.launch.coordinator import spec_to_json
from pipeline.launch.engine_rank import EngineRank
from pipeline.launch.rpc import RpcServer
from pipeline.launch.trainer_rank import EndRequest, TrainerRank
from pipeline.records import GroupSpec, Outcome, RolloutRecord
from pipeline.report.store import write_group
from pipeline.training.checkpoint import CheckpointError

HANG_S = 3.0
SILENCE_S = 1.5


class Workshop:
    """Rollouts that take no time; the first ``spoilt`` of them find the file system away."""

    def __init__(self, home: Path, spoilt: int = 0, on_spoilt: Callable[[], object] = lambda: None) -> None:
        self.harness_home, self.counters = home, Counter[str]()
        self.spoilt, self.on_spoilt, self.made = spoilt, on_spoilt, 0
        self.go = True

    async def roll_out(self, spec: GroupSpec, index: int) -> RolloutRecord:
        while not self.go:
            await asyncio.sleep(0.01)
        self.made += 1
        cause = "system" if self.made <= self.spoilt else ""
        if cause:
            self.on_spoilt()
        record = rollout(spec_to_json(spec), index, cause)
        return replace(record, version=replace(record.version, n=0))


class Rank(EngineRank):
    """Without vLLM, shards and sandboxes."""

    def __init__(self, run: Harness, workshop: Workshop) -> None:
        super().__init__(run.config, run.attempt, 0)
        self._fake = workshop
        self.supervisor = Mock(start=AsyncMock(), stop=AsyncMock(), stats=dict)

    async def _start_engine(self) -> None:
        self.up.set()

    async def _watch_engine(self) -> None:
        await asyncio.Event().wait()

    def _workshop(self) -> Workshop:  # type: ignore[override]
        return self._fake


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Harness:
    monkeypatch.setattr(engine_module, "COORDINATOR_SILENCE_S", SILENCE_S)
    monkeypatch.setattr(engine_module, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(storage_module, "ALARM_S", 0.1)
    run = Harness(tmp_path)
    for task in {spec.task.path for spec in map(run.flow.schedule.group, range(20))}:
        assert not task.exists()
    return run


@contextmanager
def serving(run: Harness, workshop: Workshop) -> Iterator[Rank]:
    """An engine rank at work for the coordinator, until the end of the block."""
    server = RpcServer(run.coordinator.methods, "token")
    run.attempt.publish("coordinator", {"url": server.url, "token": "token"})
    run.coordinator.engines.clear()
    rank, failures = Rank(run, workshop), []

    def serve() -> None:
        try:
            asyncio.run(rank.run())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        wait_for(lambda: run.coordinator.engines)
        run.coordinator.set_weights(run.coordinator.engines["node0"], str(run.flow.version))
        yield rank
    finally:
        run.coordinator.stop()
        thread.join(LONG_S)
        server.stop()
    assert not failures, failures


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch) -> None:
    """The places that a rollout needs are there."""
    monkeypatch.setattr(storage_module.Storage, "was_away", lambda self, since, places: self._last_trouble > since)


def test_a_disk_that_hangs_stops_no_heartbeat(run: Harness, monkeypatch: pytest.MonkeyPatch, present: None) -> None:
    hang, hanging = threading.Event(), threading.Event()

    def write(path: Path, records: list[RolloutRecord]) -> None:
        hanging.set()
        assert hang.wait(LONG_S)
        write_group(path, records)

    monkeypatch.setattr(engine_module, "write_group", write)
    with serving(run, Workshop(Path("/"))):
        assert hanging.wait(LONG_S)
        end = time.monotonic() + HANG_S
        while time.monotonic() < end:
            assert run.coordinator.lost_engines(SILENCE_S) == []
            time.sleep(0.05)
        assert run.alarms() and "no answer" in run.alarms()[0]
        hang.set()
        wait_for(lambda: run.flow.ready)
    assert run.ledger("admitted")


def test_a_coordinator_whose_disk_hangs_answers_all_the_same(
    run: Harness, monkeypatch: pytest.MonkeyPatch, present: None
) -> None:
    """Reading a closed group and writing the ledger both hang; the group is closed once, afterwards."""
    hang, hanging = threading.Event(), threading.Event()
    true_read, true_append = storage_module.read_group, storage_module.append_lines

    def read(path: Path) -> tuple[RolloutRecord, ...]:
        hanging.set()
        assert hang.wait(LONG_S)
        return true_read(path)

    def append(*arguments: Any) -> int:
        assert hang.wait(LONG_S)
        return true_append(*arguments)

    monkeypatch.setattr(storage_module, "read_group", read)
    monkeypatch.setattr(storage_module, "append_lines", append)
    with serving(run, Workshop(Path("/"))):
        assert hanging.wait(LONG_S)
        run.coordinator._note("g", "abandoned", "to have a line wait")
        end = time.monotonic() + HANG_S
        while time.monotonic() < end:
            assert run.coordinator.lost_engines(SILENCE_S) == []
            time.sleep(0.05)
        hang.set()
        wait_for(lambda: run.flow.ready)
    admitted = [entry["group"] for entry in run.ledger("admitted")]
    assert admitted and len(admitted) == len(set(admitted))


def test_a_group_that_is_handed_in_twice_is_closed_once(run: Harness) -> None:
    work = run.close("", ())
    path = run.attempt.groups / f"{work['group_id']}.parquet"
    run.coordinator.close("node0", work, str(path))
    assert run.coordinator.progress.rollouts == work["size"] and not run.ledger("ignored")


def test_a_file_that_another_node_has_just_published_is_waited_for(
    run: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module, "FIRST_PAUSE_S", 0.01)
    true_read, tries = storage_module.read_group, []

    def read(path: Path) -> tuple[RolloutRecord, ...]:
        tries.append(path)
        return true_read(path if len(tries) > 3 else path.with_name("not-yet"))

    monkeypatch.setattr(storage_module, "read_group", read)
    run.close("", ())
    assert len(tries) == 4 and run.flow.ready


def test_rollouts_that_the_outage_spoilt_are_made_again(run: Harness, present: None) -> None:
    workshop = Workshop(Path("/"), 3)
    with serving(run, workshop) as rank:
        workshop.on_spoilt = lambda: rank.storage._say("read", "away", time.monotonic())
        wait_for(lambda: run.flow.ready)
    assert not run.ledger("rerolled") and workshop.made > 3
    assert all(r.outcome is not Outcome.INFRASTRUCTURE for ready in run.flow.ready for r in ready.group.rollouts)


@pytest.mark.parametrize(("ending", "returncode", "graded"), [(True, 138, False), (True, 0, True), (False, 138, True)])
def test_what_the_job_s_own_end_killed_is_not_graded(
    run: Harness, present: None, ending: bool, returncode: int, graded: bool
) -> None:
    """Node dies of the warning that some Slurms send to every process of a job."""
    run.coordinator.end_asked = lambda: ending
    workshop = Workshop(Path("/"))
    roll_out = workshop.roll_out

    async def killed(spec: GroupSpec, index: int) -> RolloutRecord:
        record = await roll_out(spec, index)
        return replace(record, info=record.info | {"returncode": returncode})

    workshop.roll_out = killed  # type: ignore[method-assign]
    with serving(run, workshop):
        wait_for(lambda: run.coordinator.progress.records)
    assert {record.verdict.correctness is not None for record in run.coordinator.progress.records} == {graded}


class Team:
    """Checkpoints that fail until the disk is mended."""

    def __init__(self) -> None:
        self.full, self.saved, self.tries = True, 0, 0

    def save(self, root: Path, state: dict[str, Any]) -> None:
        self.tries += 1
        if self.full:
            raise CheckpointError("could not write it (0 MiB free).")
        self.saved += 1

    def rest(self) -> None:
        pass


class Trainer(TrainerRank):
    """Only what waits and saves."""

    def __init__(self, run: Harness, wait_s: float) -> None:
        self.config, self.flow, self.coordinator, self.attempt = run.config, run.flow, run.coordinator, run.attempt
        self.run, self.end, self.storage = run.attempt.run, EndRequest(), run.coordinator.storage
        self.team: Any = Team()
        self.evaluations = Mock()
        self.state = {"wall_s": {}}
        self._phase_name, self._phase_since = "train", time.monotonic()
        self.saving = storage_module.Saving(wait_s, self._tell)


def test_training_goes_on_while_no_checkpoint_can_be_written(run: Harness) -> None:
    trainer = Trainer(run, LONG_S)
    assert trainer.save() is False
    assert len(run.alarms()) == 1 and "Training goes on, trying again" in run.alarms()[0]

    def tried_again() -> bool:
        trainer._check_the_others()
        return trainer.team.tries > 2

    wait_for(tried_again)
    trainer.team.full = False
    wait_for(lambda: trainer._check_the_others() or trainer.team.saved)
    assert not trainer.saving.failing and len(run.alarms()) == 1


def test_no_checkpoint_for_too_long_is_the_user_s_to_mend(run: Harness) -> None:
    trainer = Trainer(run, 0.5)
    trainer.save()
    with pytest.raises(UserError, match=r"no checkpoint for .*storage_wait_s.*0 MiB free"):
        wait_for(trainer._check_the_others)


def test_the_last_checkpoint_is_waited_for(run: Harness) -> None:
    trainer = Trainer(run, LONG_S)
    mend = threading.Timer(1.0, lambda: setattr(trainer.team, "full", False))
    mend.start()
    trainer._insist(trainer._write_checkpoint)
    assert trainer.team.saved == 1 and trainer.team.tries > 1


def test_an_engine_s_lost_disk_is_the_user_s_to_mend(run: Harness) -> None:
    run.coordinator.fail("node1", "no room", mistake=True)
    with pytest.raises(UserError, match="engine rank node1: no room"):
        Trainer(run, LONG_S)._check_the_others()
    assert errno.ENOSPC in storage_module.TROUBLE

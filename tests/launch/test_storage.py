"""A run directory that is full, away or hangs: time is lost and nothing else; and ghosts that write late."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import LONG_S, wait_for

from pipeline.config import UserError
from pipeline.launch import storage as storage_module
from pipeline.launch.run_directory import Attempt, FencedOff, RunDirectory
from pipeline.launch.storage import Lines, Saving, Storage, StorageLost, os_error
from pipeline.report.metrics import begin_metrics, read_metrics
from pipeline.report.store import append_jsonl, read_jsonl, write_text
from pipeline.training.checkpoint import CheckpointError

BAD = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENOENT]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(storage_module, "LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr(storage_module, "ALARM_S", 0.05)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return RunDirectory(tmp_path / "run").new_attempt()


class Told:
    def __init__(self) -> None:
        self.news: list[tuple[str, str]] = []

    def __call__(self, kind: str, text: str) -> None:
        self.news.append((kind, text))

    def of(self, kind: str) -> list[str]:
        return [text for of, text in self.news if of == kind]


class Outage:
    """os.replace raises while it is on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.on, self.failures, self._replace = True, 0, os.replace
        self.number = number
        monkeypatch.setattr(os, "replace", self)

    def __call__(self, source: Any, target: Any) -> None:
        if self.on:
            self.failures += 1
            raise OSError(self.number, os.strerror(self.number), str(target))
        self._replace(source, target)


@pytest.mark.parametrize("number", BAD)
def test_an_outage_costs_time_and_is_told_once(attempt: Attempt, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    told, outage = Told(), Outage(monkeypatch, number)
    storage = Storage(attempt, LONG_S, told)
    place = attempt.root / "x"
    writer = threading.Thread(target=lambda: storage.publish("write x", lambda: write_text(place, "whole")))
    writer.start()
    wait_for(lambda: told.of("error") and outage.failures > 3)
    assert not place.exists() and writer.is_alive()
    outage.on = False
    writer.join(LONG_S)
    assert place.read_text() == "whole"
    assert len(told.of("error")) == 1 and "ALARM" in told.of("error")[0] and "trying again until" in told.of("error")[0]
    assert len(told.of("message")) == 1 and "can be used again" in told.of("message")[0]
    assert not list(attempt.root.glob(".x*")), "nothing half-written is left"


def test_after_its_time_the_run_ends_as_the_user_s_to_mend(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    Outage(monkeypatch, errno.ENOSPC)
    storage = Storage(attempt, 0.1)
    with pytest.raises(UserError, match=r"storage_wait_s.*write x.*No space left.*start the run again"):
        storage.publish("write x", lambda: write_text(attempt.root / "x", "whole"))
    assert storage.lost is not None


def test_other_errors_are_nobody_s_wait(attempt: Attempt) -> None:
    def mistaken() -> None:
        raise PermissionError(errno.EACCES, "no")

    with pytest.raises(PermissionError):
        Storage(attempt, LONG_S).insist("write", mistaken)


def test_an_unmounted_directory_is_waited_for_and_nothing_is_made_there(attempt: Attempt) -> None:
    """Under the mount point lies an empty directory, where writing is refused, or worse, possible."""
    away = attempt.run.root.with_name("away")
    attempt.run.root.rename(away)
    attempt.run.root.mkdir()
    storage = Storage(attempt, LONG_S)
    lines = Lines(storage)
    lines.add(attempt.ledger, {"n": 1})
    writer = threading.Thread(
        target=lambda: storage.publish("write", lambda: write_text(attempt.groups / "x", "whole"))
    )
    writer.start()
    assert not lines.flush(0.2) and writer.is_alive()
    assert list(attempt.run.root.iterdir()) == []
    attempt.run.root.rmdir()
    away.rename(attempt.run.root)
    writer.join(LONG_S)
    assert lines.flush(LONG_S) and (attempt.groups / "x").exists() and read_jsonl(attempt.ledger) == [{"n": 1}]


def test_a_call_that_hangs_is_told_of(attempt: Attempt) -> None:
    told, hang = Told(), threading.Event()
    worker = threading.Thread(target=lambda: Storage(attempt, LONG_S, told).insist("read x", hang.wait))
    worker.start()
    wait_for(lambda: told.of("error"))
    assert "read x: no answer" in told.of("error")[0]
    hang.set()
    worker.join(LONG_S)
    assert told.of("message")


def test_a_ghost_that_waited_for_the_disk_does_not_write(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    outage, ended = Outage(monkeypatch, errno.EIO), []

    def ghost() -> None:
        try:
            Storage(attempt, LONG_S).publish("write x", lambda: write_text(attempt.root / "x", "late"))
        except FencedOff as error:
            ended.append(error)

    worker = threading.Thread(target=ghost)
    worker.start()
    wait_for(lambda: outage.failures)
    attempt.run.new_attempt()
    outage.on = False
    worker.join(LONG_S)
    assert ended and not (attempt.root / "x").exists()


def test_a_wait_looks_at_the_fence_now_and_then(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, looks = Storage(attempt, LONG_S), []
    numbers = RunDirectory.attempt_numbers
    monkeypatch.setattr(RunDirectory, "attempt_numbers", lambda run: looks.append(1) or numbers(run))
    for _ in range(100):
        storage.glance()
    assert len(looks) <= 2
    attempt.run.new_attempt()
    monkeypatch.setattr(storage_module, "FENCE_S", 0.0)
    with pytest.raises(FencedOff):
        storage.glance()


def test_a_wait_goes_on_while_the_fence_cannot_be_read(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "FENCE_S", 0.0)

    def broken(run: RunDirectory) -> list[int]:
        raise OSError(errno.ESTALE, "stale")

    monkeypatch.setattr(RunDirectory, "attempt_numbers", broken)
    Storage(attempt, LONG_S).glance()


def test_the_disk_is_found_behind_other_errors() -> None:
    try:
        try:
            raise OSError(errno.ENOSPC, "full")
        except OSError as full:
            raise UserError("cannot") from full
    except UserError as error:
        found = os_error(error)
    assert found is not None and found.errno == errno.ENOSPC
    assert os_error(UserError("wrong setting")) is None


class TornDisk:
    """Takes some bytes of a write, then is full, as real ones are, until it is mended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full, self.torn = True, 0
        true_append = storage_module.append_lines

        def append(path: Path, entries: list[dict[str, Any]], keep: int | None) -> int:
            if not self.full:
                return true_append(path, entries, keep)
            self.torn += 1
            data = b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)
            with open(path, "ab") as file:
                file.truncate(keep or 0)
                file.write(data[: len(data) - self.torn % 3])  # with or without its last newline
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(storage_module, "append_lines", append)


def test_ledger_lines_keep_their_order_and_come_once(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines(Storage(attempt, LONG_S))
    lines.add(attempt.ledger, {"n": 0})
    assert lines.flush(LONG_S)
    disk = TornDisk(monkeypatch)
    for number in range(1, 50):
        lines.add(attempt.ledger, {"n": number})
    wait_for(lambda: disk.torn > 4)
    disk.full = False
    assert lines.flush(LONG_S)
    assert read_jsonl(attempt.ledger) == [{"n": number} for number in range(50)]


def test_whoever_adds_a_line_waits_for_nothing(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()
    monkeypatch.setattr(storage_module, "append_lines", lambda *_: hang.wait(LONG_S) and 0)
    monkeypatch.setattr(storage_module, "LINES_KEPT", 5)
    lines = Lines(Storage(attempt, LONG_S))
    for number in range(20):
        lines.add(attempt.ledger, {"n": number})
    assert not lines.flush(0.05)
    hang.set()
    assert lines.flush(LONG_S)


def test_a_checkpoint_that_fails_is_tried_again_and_at_last_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    saving = Saving(0.2, told)
    assert not saving.due and not saving.failing
    saving.failed(CheckpointError("disk full."))
    assert saving.failing and "Training goes on" in told.of("error")[0]
    wait_for(lambda: saving.due)
    saving.worked()
    assert not saving.due and told.of("message")
    saving.failed(CheckpointError("disk full."))
    time.sleep(0.3)
    with pytest.raises(StorageLost, match=r"no checkpoint for .*disk full"):
        saving.failed(CheckpointError("disk full."))
    assert len(told.of("error")) == 2, "once an outage"


def test_the_last_word_finds_room_on_a_full_disk(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    (reserve,) = (path for path in attempt.root.iterdir() if path.stat().st_size > 10_000)
    replace = os.replace

    def full(source: Any, target: Any) -> None:
        if reserve.exists():
            raise OSError(errno.ENOSPC, "full")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    attempt.fail("trainer", StorageLost("no room"))
    assert attempt.read("failed") == {"rank": "trainer", "text": "no room", "user_error": True}


def test_a_last_word_that_cannot_be_left_hides_no_error(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    Outage(monkeypatch, errno.ENOSPC)
    attempt.fail("trainer", RuntimeError("the real one"))
    assert attempt.read("failed") is None


# --- what ghosts leave


def checkpoint_of(run: RunDirectory, attempt: int) -> None:
    (run.checkpoints / f"{attempt:04d}-000001-update-000004").mkdir(parents=True)


def test_a_ghost_s_word_that_the_run_is_done_does_not_count(attempt: Attempt) -> None:
    checkpoint_of(attempt.run, 1)
    attempt.publish("done", {"rollouts": 3})
    assert attempt.run.done == {"rollouts": 3}
    attempt.run.new_attempt()  # an evaluation by itself
    assert attempt.run.done == {"rollouts": 3}
    checkpoint_of(attempt.run, 2)
    assert attempt.run.done is None


def log_updates(attempt: Attempt, *updates: int) -> None:
    for update in updates:
        append_jsonl(attempt.metrics, {"update": update, "by": attempt.number})


def test_metrics_are_those_of_the_weights(attempt: Attempt) -> None:
    """Attempt 1 got to update 5, its last checkpoint is of update 3, and its ghost goes on beside attempt 2."""
    run = attempt.run
    begin_metrics(run.root, attempt.metrics, None, 0)
    log_updates(attempt, 0, 1, 2, 3, 4, 5)
    second = run.new_attempt()
    begin_metrics(run.root, second.metrics, 1, 3)
    assert [entry["update"] for entry in read_metrics(run.root)] == [0, 1, 2, 3]
    log_updates(second, 4)
    log_updates(attempt, 6, 7)
    assert [(entry["update"], entry["by"]) for entry in read_metrics(run.root)][-2:] == [(3, 1), (4, 2)]
    assert read_jsonl(run.metrics) == read_jsonl(second.metrics), "the run's file is the newest attempt's"
    third = run.new_attempt()  # attempt 2 left no checkpoint, the ghost's last one is of update 6
    begin_metrics(run.root, third.metrics, 1, 6)
    assert [(entry["update"], entry["by"]) for entry in read_metrics(run.root)] == [(n, 1) for n in range(7)]


def test_metrics_of_a_fresh_start_are_empty(attempt: Attempt) -> None:
    begin_metrics(attempt.run.root, attempt.metrics, None, 0)
    log_updates(attempt, 0, 1)
    second = attempt.run.new_attempt()
    begin_metrics(attempt.run.root, second.metrics, None, 0)
    assert read_metrics(attempt.run.root) == []

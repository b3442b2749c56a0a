"""status.json: whole at any time, newest attempt's only, and no burden to the run whatever the file system does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from logged import ours

from pipeline.launch import snapshotter
from pipeline.launch.run_directory import FencedOff, RunDirectory
from pipeline.launch.snapshotter import Snapshotter

LONG_S = 30.0


class Run:
    """What a coordinator would tell; counts how often it was asked."""

    def __init__(self) -> None:
        self.update, self.phase, self.asked, self.looked = 0, "start", 0, 0

    def take(self) -> dict[str, Any]:
        self.asked += 1
        return {"update": self.update, "phase": self.phase, "asked": self.asked}

    def news(self) -> tuple[Any, ...]:
        self.looked += 1
        return (self.update, self.phase)


def wait_for(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LONG_S
    while not (value := what()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)
    return value


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def test_news_are_written_at_once_and_the_rest_now_and_then(tmp_path: Path) -> None:
    run, path = Run(), tmp_path / "status.json"
    keeper = Snapshotter(path, run.take, run.news, lambda: None, every_s=1e6)
    wait_for(path.exists)
    looked = run.looked
    wait_for(lambda: run.looked > looked + 2)
    assert run.asked == read(path)["asked"] == 1, "nothing new: nobody is asked, nothing written before its time"
    run.update = 1
    wait_for(lambda: read(path)["update"] == 1)
    run.phase = "train"
    wait_for(lambda: read(path)["phase"] == "train")
    keeper.stop()
    assert read(path)["asked"] == run.asked, "a last one at the end"
    assert [item.name for item in tmp_path.iterdir()] == ["status.json"], "no temporary file is left"


def test_it_is_written_anew_when_its_time_has_come(tmp_path: Path) -> None:
    run, path = Run(), tmp_path / "status.json"
    keeper = Snapshotter(path, run.take, run.news, lambda: None, every_s=0.0)
    wait_for(lambda: read(path).get("asked", 0) > 2)
    keeper.stop()


def test_a_ghost_leaves_the_file_to_the_newer_attempt(tmp_path: Path) -> None:
    directory, run = RunDirectory(tmp_path / "run"), Run()
    first = directory.new_attempt()
    keeper = Snapshotter(directory.status, run.take, run.news, first.check_fence, every_s=0.0)
    wait_for(directory.status.exists)
    directory.new_attempt()
    wait_for(lambda: not keeper._thread.is_alive())
    directory.status.write_text("the newer attempt's")
    keeper.stop()
    assert directory.status.read_text() == "the newer attempt's"
    with pytest.raises(FencedOff):
        first.check_fence()


def test_a_hanging_file_system_holds_up_one_write_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang, writes = threading.Event(), []

    def write(path: Path, text: str) -> None:
        writes.append(text)
        hang.wait(LONG_S)

    monkeypatch.setattr(snapshotter, "write_text", write)
    run = Run()
    keeper = Snapshotter(tmp_path / "status.json", run.take, run.news, lambda: None, every_s=0.0)
    wait_for(lambda: writes)
    run.update = 5
    started = time.monotonic()
    keeper.stop(deadline_s=0.5)
    assert time.monotonic() - started < LONG_S / 2, "the end of a run does not wait for it"
    assert len(writes) == 1, "one write in flight at a time"
    hang.set()
    keeper._thread.join(LONG_S)
    assert json.loads(writes[-1])["update"] == 5, "what is news goes out when the file system is back"


def test_a_full_disk_is_told_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, failures, true_write = tmp_path / "status.json", [], snapshotter.write_text

    def write(target: Path, text: str) -> None:
        if len(failures) < 2:
            failures.append(text)
            raise OSError(28, "No space left on device")
        true_write(target, text)

    monkeypatch.setattr(snapshotter, "write_text", write)
    keeper = Snapshotter(path, (run := Run()).take, run.news, lambda: None, every_s=0.0)
    wait_for(path.exists)
    keeper.stop()
    assert [record.levelname for record in ours(caplog)] == ["WARNING"]

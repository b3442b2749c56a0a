"""A real full disk and a real file system that hangs for a minute, under a coordinator and an engine rank."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_engine_rank import SILENCE_S, Workshop, present, run, serving, wait_for
from test_set_aside import Harness

from pipeline.launch import storage as storage_module
from pipeline.launch.storage import StorageLost

__all__ = ["present", "run"]  # fixtures

FREEZE_S = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def shell(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small file system of its own, in place of a directory of the machine's."""
    place = tmp_path_factory.mktemp("disk")
    image, mount = place / "image", place / "mount"
    mount.mkdir()
    if request.param == "ext4":
        with image.open("wb") as file:
            file.truncate(32 << 20)
        made = shell("mkfs.ext4", "-q", str(image))
        done = made if made.returncode else shell("mount", "-o", "loop", str(image), str(mount))
    else:
        done = shell("mount", "-t", "tmpfs", "-o", "size=4m", "none", str(mount))
    if done.returncode:
        pytest.skip(f"no mounting here: {done.stderr.strip()}")
    try:
        yield mount
    finally:
        shell("fsfreeze", "-u", str(mount))
        shell("umount", "-l", str(mount))


def fill(path: Path) -> None:
    """Until not a byte is left, as somebody else on the same disk does."""
    size = 1 << 20
    with path.open("wb", buffering=0) as file:
        while size:
            try:
                file.write(b"x" * size)
            except OSError:
                size //= 2


@pytest.fixture
def workshop(monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Its rollouts wait for ``go``."""
    monkeypatch.setattr(storage_module, "ALARM_S", 3.0)
    workshop = Workshop(Path("/"))
    workshop.go = False
    return workshop


@pytest.mark.parametrize("tmp_path", ["tmpfs", "ext4"], indirect=True)
def test_a_full_disk_costs_time(run: Harness, tmp_path: Path, workshop: Workshop, present: None) -> None:
    filler = tmp_path / "filler"
    with serving(run, workshop):
        fill(filler)
        workshop.go = True
        wait_for(run.alarms)
        assert "No space left on device" in run.alarms()[0] and run.coordinator.lost_engines(SILENCE_S) == []
        run.attempt.fail("trainer", StorageLost("no room"))
        failed = run.attempt.read("failed")
        assert failed is not None and failed["user_error"], "the last word finds room"
        assert not run.flow.ready
        filler.unlink()
        wait_for(lambda: run.flow.ready)
    assert not [path for path in tmp_path.rglob(".*.tmp")], "nothing half-written is left"
    assert run.ledger("admitted")


@pytest.mark.parametrize("tmp_path", ["ext4"], indirect=True)
def test_a_minute_s_hang_costs_a_minute(run: Harness, tmp_path: Path, workshop: Workshop, present: None) -> None:
    with serving(run, workshop):
        frozen = shell("fsfreeze", "-f", str(tmp_path))
        if frozen.returncode:
            pytest.skip(f"this file system cannot be frozen: {frozen.stderr.strip()}")
        workshop.go = True
        end = time.monotonic() + FREEZE_S
        while time.monotonic() < end:
            assert run.coordinator.lost_engines(SILENCE_S) == []
            time.sleep(0.1)
        assert run.alarms() and "no answer" in run.alarms()[0] and not run.flow.ready
        assert shell("fsfreeze", "-u", str(tmp_path)).returncode == 0
        wait_for(lambda: run.flow.ready)
    admitted = [entry["group"] for entry in run.ledger("admitted")]
    assert admitted and len(admitted) == len(set(admitted))

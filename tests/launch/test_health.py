"""What a node tells of itself, with stand-ins for nvidia-smi of every temper."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from pipeline.launch import health
from pipeline.launch.health import HealthProbe, gpu_health, host_health

LONG_S = 30.0


@pytest.fixture
def bin_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first in PATH, which otherwise has no nvidia-smi."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def program(folder: Path, text: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_gpus_are_read(bin_dir: Path) -> None:
    query = "--query-gpu=index,utilization.gpu,memory.used,memory.total --format=csv,noheader,nounits"
    program(bin_dir, f'[ "$*" = "{query}" ] || exit 9\nprintf "0, 97, 70123, 81559\\n1, [N/A], 12, 81559\\n"')
    assert gpu_health() == {
        "gpus": [
            {"index": 0, "utilisation": 97, "used_mib": 70123, "total_mib": 81559},
            {"index": 1, "utilisation": None, "used_mib": 12, "total_mib": 81559},
        ],
        "gpu_error": None,
    }


def test_a_node_without_gpu_says_so(bin_dir: Path) -> None:
    assert not (bin_dir / "nvidia-smi").exists()
    assert gpu_health() == {"gpus": [], "gpu_error": None}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("exec sleep 600", "nvidia-smi did not answer within 0.3 s"),
        ("echo 'No devices were found'; exit 6", "nvidia-smi: No devices were found"),
        ("exit 7", "nvidia-smi: exit code 7"),
    ],
)
def test_an_ailing_gpu_is_told_from_none(bin_dir: Path, text: str, error: str) -> None:
    program(bin_dir, text)
    assert gpu_health(0.3) == {"gpus": None, "gpu_error": error}


def test_the_host_is_read() -> None:
    seen = host_health()
    assert 0 < seen["memory_used_gib"] < seen["memory_gib"]
    assert seen["cpus"] == os.cpu_count()


def test_nobody_waits_for_a_look_and_there_is_one_at_a_time(bin_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = bin_dir / "marks"
    program(bin_dir, f"echo x >> {marks}; sleep 2; echo '0, 1, 2, 3'")
    probe = HealthProbe(every_s=0.0)
    started = time.monotonic()
    assert probe.latest() == {}
    for _ in range(20):
        probe.latest()
    assert time.monotonic() - started < 2, "asking does not wait"
    deadline = time.monotonic() + LONG_S
    while not probe.latest():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert probe.latest()["gpus"] == [{"index": 0, "utilisation": 1, "used_mib": 2, "total_mib": 3}]
    assert marks.read_text().count("x") <= 2


def test_it_looks_again_only_when_the_last_look_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(health, "gpu_health", lambda: looks.append(1) or {"gpus": []})
    probe = HealthProbe(every_s=1e6)
    deadline = time.monotonic() + LONG_S
    while not probe.latest():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for _ in range(5):
        probe.latest()
        time.sleep(0.02)
    assert len(looks) == 1

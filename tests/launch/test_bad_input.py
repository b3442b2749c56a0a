"""Wrong settings end at start: exit code 2, one clear message, no traceback, nothing half-written."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

YOKE = [sys.executable, "-m", "pipeline", "train", "+experiment=smoke"]


def yoke(run_dir: Path, *overrides: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*YOKE, f"run_dir={run_dir}", *overrides],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | (environment or {}),
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def assert_refused(done: subprocess.CompletedProcess[str], run_dir: Path, *words: str) -> None:
    assert done.returncode == 2, done.stderr
    message = done.stderr.strip().splitlines()
    assert len([line for line in message if line.startswith("yoke: ")]) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert not run_dir.exists(), "nothing half-written"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["mix.harnesses=[clade-code]"], ["clade-code", "pi"]),
        (["model.path=/no/such/model"], ["model.path=/no/such/model"]),
        (["algorithm.grup_size=8"], ["grup_size"]),
        (["algorithm.updates=8"], ["training.updates"]),
        (["algorithm.group_size=many"], ["group_size", "many"]),
        (["sandbox.kind=docker"], ["docker", "bubblewrap"]),
        (["algorithm.group_size=64"], ["group_size=64", "max_outstanding_rollouts=24"]),
        (["algorithm.groups_per_update=7"], ["max_outstanding_rollouts=24"]),
        (["reward.fn=no.such:thing"], ["no.such"]),
        (["tasks=harbor", "tasks.train=/no/such", "tasks.test=/no/such"], ["/no/such"]),
        (["algorithm.loss=magic"], ["magic"]),
        (["algorithm.aggregation=magic"], ["magic"]),
        (["engine.weight_transfer=pigeon"], ["pigeon"]),
        (["training.zero_stage=5"], ["zero_stage=5"]),
        (["cluster.name=moon"], ["cluster.name=moon"]),
        (["mix.harnesses=[pi,pi]"], ["twice"]),
        (["tasks=smoldata", "tasks.train=/no/such"], ["tasks.train=/no/such", "OWNER/NAME@COMMIT"]),
        (["tasks.gates.leak=fatal"], ["tasks.gates.leak=fatal", "warning"]),
        (["tasks.test_size=0"], ["test_size"]),
        (["evaluation.every=-1"], ["evaluation.every=-1"]),
        (["+evaluation.cluster.time=9"], ["evaluation.cluster has no time", "timeout_min"]),
        (["model.path=no/such/model"], ["no/such/model"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_wrong_settings(run_dir: Path, overrides: list[str], words: list[str]) -> None:
    assert_refused(yoke(run_dir, *overrides), run_dir, *words)


@pytest.mark.slow
def test_port_in_use(run_dir: Path, taken_port: int) -> None:
    assert_refused(yoke(run_dir, f"engine.port={taken_port}"), run_dir, str(taken_port))


@pytest.mark.slow
def test_fresh_spares_what_is_not_a_run(tmp_path: Path) -> None:
    place = tmp_path / "project"
    place.mkdir()
    (place / "config.yaml").write_text("mine: true\n")
    done = yoke(place, "fresh=true")
    assert done.returncode == 2 and "other things than a run" in done.stderr
    assert (place / "config.yaml").read_text() == "mine: true\n"


@pytest.mark.slow
def test_run_dir_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    done = yoke(tmp_path / "run")
    assert done.returncode == 2 and "not a directory" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_task_without_tests(run_dir: Path, tmp_path: Path) -> None:
    task = tmp_path / "tasks" / "broken"
    task.mkdir(parents=True)
    (task / "task.toml").write_text('schema_version = "1.4"\n[task]\nname = "x/broken"\n')
    (task / "instruction.md").write_text("Do it.\n")
    where = tmp_path / "tasks"
    done = yoke(run_dir, "tasks=harbor", f"tasks.train={where}", f"tasks.test={where}")
    assert_refused(done, run_dir, str(task), "tests")


@pytest.mark.slow
def test_no_sandbox(run_dir: Path, tmp_path: Path) -> None:
    """A machine on which no sandbox can be built: the probes fail as they do on such a kernel."""
    (tmp_path / "sitecustomize.py").write_text(
        "from pipeline.sandbox import apptainer, bubblewrap\n"
        "for kind in (apptainer.ApptainerSandbox, bubblewrap.BubblewrapSandbox):\n"
        "    kind.probe = lambda self: 'No permissions to create a new namespace'\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = yoke(run_dir, environment={"PYTHONPATH": path})
    assert_refused(done, run_dir, "bubblewrap", "apptainer", "sandbox=process")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_full_disk(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], check=True)
    try:
        assert_refused(yoke(place / "run"), place / "run", "GB free", str(place))
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
def test_unknown_job_and_help() -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "pipeline", *words], capture_output=True, text=True, timeout=60)

    wrong = run("trian")
    assert wrong.returncode == 2 and "train" in wrong.stderr and "Traceback" not in wrong.stderr
    assert run("--help").returncode == 0
    shown = run("train", "--cfg", "+experiment=smoke")
    assert shown.returncode == 0 and "group_size: 4" in shown.stdout

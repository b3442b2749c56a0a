"""Sandboxes inside a Slurm job's step: its warnings do not end them, its end takes everything in them along."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from living import alive
from real_apptainer import INSTALLED, ISOLATED
from slurm_helpers import ENDED, Testbed, wait_until

ROOT = Path(__file__).parents[2]
NOBODY = 65534
SYSTEM_PYTHON = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin")

# An engine rank's share: it ignores the warnings, as all that it starts does, and runs an agent that leaves daemons.
RANK = """
import asyncio, signal, sys
from pipeline.config import SandboxConfig
from pipeline.sandbox import SandboxSpec, make_sandbox
kind, mark, end = sys.argv[1:]
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
script = f"(setsid bash -c 'exec -a {mark} sleep 600' &) ; (exec -a {mark} sleep 600) & wait $!"
async def main():
    process = await make_sandbox(SandboxConfig(kind=kind)).launch(
        SandboxSpec(("bash", "-c", script), listen_port=8000, timeout_s=600))
    process.go()
    await (process.wait() if end == "waits" else asyncio.sleep(3))
asyncio.run(main())
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user can write to."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


@pytest.fixture(params=["root", "a user"])
def who(request: pytest.FixtureRequest) -> int:
    """As whom the step's program runs. (A whole job of another user's cannot read the files of a testbed of root's.)"""
    if request.param == "root":
        return os.getuid()
    if os.getuid() != 0 or SYSTEM_PYTHON is None:
        pytest.skip("only root runs programs as others, with a system Python of this version that they can read")
    return NOBODY


def submit(slurm: Testbed, place: Path, kind: str, who: int, end: str) -> tuple[str, str]:
    """The id of a job with one step that runs RANK, and the name of its agent's two processes."""
    mark = f"agent-{uuid.uuid4().hex}"
    (place / "rank.py").write_text(RANK)
    packages = [str(ROOT), *(entry for entry in sys.path if entry.endswith("site-packages"))]
    python = sys.executable if who == os.getuid() else SYSTEM_PYTHON
    become = "" if who == os.getuid() else f"setpriv --reuid={who} --regid={who} --clear-groups"
    command = f"srun --kill-on-bad-exit=1 {become} {python} -B {place}/rank.py {kind} {mark} {end}"
    settings = {
        "PYTHONPATH": ":".join(packages),
        "PATH": f"{INSTALLED}:{os.environ['PATH']}",
        "YOKE_HOME": f"{place}/home",
        "TMPDIR": str(place),
        "SLURM_CONF": str(slurm.conf),
    }
    (place / "job.sh").write_text(
        "\n".join(["#!/bin/bash", *(f"export {k}={v!r}" for k, v in settings.items()), command])
    )
    options = (f"--chdir={place}", f"--output={place}/log", "--ntasks=1", "--time=10")
    return slurm.sbatch(*options, place / "job.sh"), mark


def both_run(slurm: Testbed, job: str, mark: str, place: Path) -> None:
    def running() -> bool:
        assert slurm.state(job) not in ENDED, (place / "log").read_text()
        return len(alive(mark)) == 2

    wait_until(running, 90, f"two processes named {mark}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ISOLATED)
def test_warnings_leave_sandboxes_alone_and_the_end_takes_all(slurm: Testbed, place: Path, kind: str, who: int) -> None:
    job, mark = submit(slurm, place, kind, who, "waits")
    both_run(slurm, job, mark, place)
    before = sorted(alive(mark))
    for number in ("USR1", "USR2"):
        slurm.run("scancel", f"--signal={number}", job)
    with pytest.raises(AssertionError, match="ended"):
        wait_until(lambda: sorted(alive(mark)) != before or slurm.state(job) != "RUNNING", 3, "ended")
    slurm.run("scancel", job)
    wait_until(lambda: not alive(mark), 60, "nothing of the agent's is left")
    slurm.wait_for(job, ENDED)
    wait_until(lambda: not list(place.glob("yoke-*")), 60, "no scratch directory is left")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ISOLATED)
def test_a_step_that_ends_by_itself_takes_its_sandboxes_along(slurm: Testbed, place: Path, kind: str) -> None:
    job, mark = submit(slurm, place, kind, os.getuid(), "leaves")
    both_run(slurm, job, mark, place)
    wait_until(lambda: not alive(mark), 90, "nothing of the agent's is left")
    assert slurm.wait_for(job, ENDED) == "COMPLETED"

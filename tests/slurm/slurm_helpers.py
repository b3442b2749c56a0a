"""A private Slurm in tests: submit, wait for states, and break its nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "slurm" / "testbed"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL")
NODES = ("n1", "n2", "n3", "n4")


def wait_until(condition: Callable[[], object], timeout_s: float, what: str, every_s: float = 0.2) -> None:
    """Poll ``condition``. Raises AssertionError that says ``what`` did not come."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(every_s)


class Testbed:
    """What slurm/testbed/start.sh starts in ``directory``."""

    __test__ = False  # its name would make it a test

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.conf = directory / "slurm.conf"
        # Of a surrounding Slurm job, if any, the jobs here must learn nothing.
        outside = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        self.env = outside | {"SLURM_CONF": str(self.conf), "OMP_NUM_THREADS": "1"}

    def start(self) -> None:
        """Start it, or whatever of it has died since."""
        subprocess.run([SCRIPTS / "start.sh", self.directory], check=True, timeout=150)

    def stop(self) -> None:
        subprocess.run([SCRIPTS / "stop.sh", self.directory], check=True, timeout=120)

    def run(self, *command: str | Path, timeout_s: float = 60.0) -> str:
        """What one of Slurm's commands prints. Raises CalledProcessError when it fails."""
        done = subprocess.run(
            command, env=self.env, cwd=ROOT, check=True, timeout=timeout_s, capture_output=True, text=True
        )
        return done.stdout.strip()

    def sbatch(self, *arguments: str | Path) -> str:
        """Submit; returns the job's id."""
        return self.run("sbatch", "--parsable", *arguments)

    def info(self, job: str) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split(" ")
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, job: str) -> str:
        """In capitals, as squeue spells it."""
        return self.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")

    def restarts(self, job: str) -> int:
        return int(self.info(job)["Restarts"])

    def wait_for(self, job: str, states: tuple[str, ...], timeout_s: float = 60.0) -> str:
        """Wait until the job is in one of ``states``; returns which."""
        wait_until(lambda: self.state(job) in states, timeout_s, f"job {job} in {states}, it is {self.state(job)}")
        return self.state(job)

    def clear(self) -> None:
        """Cancel every job and wait until all nodes are idle again."""
        self.run("scancel", f"--user={os.getuid()}")
        wait_until(lambda: not self.run("squeue", "--noheader"), 60.0, "an empty queue")

    # --- nodes

    def steps(self, node: str) -> list[int]:
        """The slurmstepd processes of ``node``: they stand in the log directory and keep the node's log open."""
        log = self.directory / "log" / f"slurmd-{node}.log"
        return [pid for pid in _pids() if _is_step(pid) and log in _open_files(pid)]

    def node_processes(self, node: str) -> list[int]:
        """Everything that ``node`` runs for jobs: its slurmstepd processes and all their descendants."""
        return with_descendants(self.steps(node))

    def kill_node(self, node: str, ghost: bool = False) -> None:
        """kill -9 of a node's slurmd and of everything that it runs; as a ``ghost`` the latter lives on."""
        victims = [int((self.directory / f"slurmd-{node}.pid").read_text())]
        if not ghost:
            victims += self.node_processes(node)
        for pid in victims:
            kill(pid)

    def give_up(self, node: str) -> None:
        """Let Slurm take a dead node for dead at once, not after half a minute of silence: its jobs are requeued."""
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=dead")


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process that may be gone already."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def alive(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def with_descendants(roots: list[int]) -> list[int]:
    """``roots`` and every process below them, parents first."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        children.setdefault(_parent(pid), []).append(pid)
    found: list[int] = []
    queue = list(roots)
    while queue:
        pid = queue.pop(0)
        found.append(pid)
        queue += children.get(pid, [])
    return found


def environment(pid: int) -> dict[str, str]:
    """With what a process was started; {} when it is gone."""
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _is_step(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text() == "slurmstepd\n"
    except OSError:
        return False


def _open_files(pid: int) -> list[Path]:
    try:
        return [entry.readlink() for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return []

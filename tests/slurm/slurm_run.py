"""Small two-node runs of `yoke train` on the testbed: submit one, watch it, read what it left."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from run_helpers import updates_done
from slurm_helpers import ENDED, ROOT, Testbed, environment, wait_until

SETTINGS = [
    "+experiment=smoke",
    "cluster=slurm",
    "cluster.timeout_min=60",
    "cluster.signal_s=60",
    "engine.cores=[0,1]",
    "training.checkpoint_every=1",
    "tasks.train_size=12",
    "tasks.test_size=4",
    "tasks.check=false",
    "logging.wandb=offline",
]


def words(process: int) -> str:
    """The command line of a process, '' when it is gone."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _is(pid: int, part: str) -> bool:
    command = words(pid)
    if part == "vllm":
        return "vllm.entrypoints" in command and "pipeline.engine.guard" not in command
    rank = {"0": "trainer", "1": "engine"}.get(environment(pid).get("SLURM_LOCALID", ""))
    return rank == part and "submitit.core._submit" in command and not command.startswith("srun ")


@dataclass
class SlurmRun:
    """One run directory and the command that trains in it."""

    bed: Testbed
    root: Path
    settings: list[str] = field(default_factory=list)

    def yoke(self, job: str, *overrides: str, timeout_s: float = 240.0) -> str:
        """What `yoke JOB` on this run prints. Raises AssertionError when it fails."""
        command = [sys.executable, "-m", "pipeline", job, f"run_dir={self.root}", *SETTINGS, *self.settings, *overrides]
        done = subprocess.run(
            command, env=self.bed.env, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self) -> str:
        """`yoke train`; returns the job's id."""
        self.yoke("train")
        return self.job

    @property
    def job(self) -> str:
        return str(json.loads((self.root / "submission.json").read_text())["job_id"])

    def finish(self, timeout_s: float) -> None:
        """Wait until the job is in the queue no more, and the run done."""
        state = self.bed.wait_for(self.job, ENDED, timeout_s)
        assert state == "COMPLETED" and self.done, f"{state}\n{self.last_words()}"

    @property
    def done(self) -> bool:
        return any(self.root.glob("attempts/*/done.json"))

    @property
    def attempts(self) -> list[int]:
        return sorted(int(path.name) for path in self.root.glob("attempts/*"))

    @property
    def updates(self) -> int:
        return updates_done(self.root)

    def attempt(self, number: int) -> Path:
        return self.root / "attempts" / f"{number:04d}"

    def ledger(self, number: int) -> list[dict[str, Any]]:
        """What became of groups in an attempt; a line that is being written is left out."""
        path = self.attempt(number) / "ledger.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def closed_since(self, moment: float, engine: str | None = None) -> bool:
        """Whether any group, or one of ``engine``'s, was closed after ``moment`` (seconds since 1970)."""
        entries = [entry for number in self.attempts[-2:] for entry in self.ledger(number) if entry["t"] > moment]
        return any(engine in (None, entry.get("engine")) for entry in entries)

    def read(self, path: Path) -> dict[str, Any]:
        """A JSON file of the run."""
        record: dict[str, Any] = json.loads(path.read_text())
        return record

    def last_words(self) -> str:
        """The ends of all logs, for the message of a failing test."""
        logs = [*self.root.glob("jobs/*.out"), *self.root.glob("attempts/*/logs/*.log")]
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-1500:]}" for path in sorted(logs))

    def nodes(self) -> list[str]:
        """Names of the nodes that the newest attempt runs on, in the order of their ranks."""
        job = json.loads((self.attempt(self.attempts[-1]) / "job.json").read_text())
        return list(job["nodes"])

    def find(self, node: str, part: str) -> int | None:
        """The pid of the trainer, the engine rank or vLLM on ``node``."""
        return next((pid for pid in self.bed.node_processes(node) if _is(pid, part)), None)

    def wait_for_updates(self, count: int, timeout_s: float = 400.0) -> None:
        wait_until(lambda: self.updates >= count, timeout_s, f"update {count} of {self.root}")


def assert_all_files_are_whole(root: Path) -> None:
    """Every result that a reader could find is readable to its end; only hidden files may be half-written."""
    seen = [path for path in root.rglob("*") if path.is_file() and not _hidden(path.relative_to(root))]
    assert not [path for path in seen if path.name.endswith((".tmp", ".partial"))]
    for path in seen:
        if path.suffix == ".parquet":
            pq.read_table(path)
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".jsonl":
            whole, _, torn = path.read_text().rpartition("\n")
            assert path.parent.parent.name == "attempts" or not torn, f"{path}: {torn}"
            for line in whole.splitlines():
                json.loads(line)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)

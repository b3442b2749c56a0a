"""Run directories in every state, made up; a coordinator that answers; and a Slurm that is a file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.launch.processes import job_of
from pipeline.launch.rpc import RpcServer
from pipeline.launch.run_directory import Attempt, RunDirectory

CONFIG = """
cluster: {max_requeues: 20, signal_s: 120}
engine: {shards: 2}
training: {updates: 20, checkpoint_every: 4}
"""
NODE = {
    "name": "node0",
    "silent_s": 0.4,
    "vllm": "up",
    "weights": "1.6",
    "restarts": 1,
    "tokens_s": 1234.0,
    "in_flight": 4,
    "queued": 2,
    "shards_alive": 2,
    "shard_restarts": 0,
    "memory_used_gib": 40.0,
    "memory_gib": 128.0,
    "load": 12.5,
    "cpus": 64,
    "gpus": [{"index": 0, "utilisation": 97, "used_mib": 71680, "total_mib": 81920}],
    "gpu_error": None,
}


def overview(attempt: int = 1, **changes: Any) -> dict[str, Any]:
    """What a coordinator in the middle of its run tells."""
    return {
        "time": time.time(),
        "attempt": attempt,
        "started": time.time() - 600,
        "phase": {"name": "train", "done": None, "total": None},
        "updates": {"done": 6, "planned": 20},
        "version": "1.6",
        "rollouts": {
            "in_flight": 4,
            "queued": 2,
            "groups_out": 2,
            "groups_ready": 1,
            "credits_used": 24,
            "credits": 96,
        },
        "counts": {"forks": 3, "undelivered": 1, "infrastructure": 0, "groups_trained": 36},
        "set_aside": {},
        "nodes": [NODE],
        "errors": [],
    } | changes


class MadeUpRun:
    """A run directory that a test fills."""

    def __init__(self, root: Path) -> None:
        self.run = RunDirectory(root)
        self.root = root
        root.mkdir(parents=True)
        self.run.config.write_text(CONFIG)

    def submitted(self, job_id: str, at: float | None = None) -> None:
        record = {"job_id": job_id, "time": at or time.time() - 1000, "code": "x"}
        (self.root / "submission.json").write_text(json.dumps(record))

    def attempt(self, job: dict[str, Any] | None, **records: dict[str, Any]) -> Attempt:
        """An attempt with its job.json and, for example, failed={…}."""
        attempt = self.run.new_attempt()
        for name, record in {"job": job, **records}.items():
            if record is not None:
                attempt.publish(name, record)
        return attempt

    def local_attempt(self, alive: bool, **records: dict[str, Any]) -> Attempt:
        job = job_of(os.getpid())
        return self.attempt(job if alive else job | {"started": 1}, **records)

    def slurm_attempt(self, job_id: str, restart: int = 0, **records: dict[str, Any]) -> Attempt:
        return self.attempt({"slurm": job_id, "restart": restart, "nodes": ["n1", "n2"]}, **records)

    def checkpoint(self, update: int) -> None:
        place = self.run.checkpoints / f"{update:06d}-update-{update:06d}"
        place.mkdir(parents=True)
        (place / "manifest.json").write_text("{}")

    def updates(self, *numbers: int, step_s: float = 10.0) -> None:
        with self.run.metrics.open("a") as file:
            for number in numbers:
                file.write(json.dumps(update_metrics(number, step_s)) + "\n")

    def snapshot(self, age_s: float, attempt: int = 1, **changes: Any) -> None:
        told = overview(attempt, **changes)
        self.run.status.write_text(json.dumps(told | {"time": told["time"] - age_s}))

    @contextmanager
    def coordinator(self, attempt: Attempt, **methods: Any) -> Iterator[None]:
        """One that answers; ``methods`` besides or instead of `overview`."""
        server = RpcServer({"overview": lambda: overview(attempt.number), **methods}, "secret")
        attempt.publish("coordinator", {"url": server.url, "token": "secret"})
        try:
            yield
        finally:
            server.stop()


def update_metrics(number: int, step_s: float) -> dict[str, float]:
    return {
        "update": number,
        "time": time.time(),
        "reward": 0.5,
        "pass_rate": 0.45,
        "pi/reward": 0.6,
        "pi/pass_rate": 0.55,
        "codex/reward": 0.4,
        "codex/pass_rate": 0.35,
        "sample/staleness_min": 0.0,
        "sample/staleness_mean": 0.8,
        "sample/staleness_max": 2.0,
        "perf/weight_sync_s": 0.21,
        "perf/weight_sync/gather_s": 0.05,
        "perf/weight_sync/load_s": 0.16,
        "perf/rollout_wait_s": 3.0,
        "perf/step_s": step_s,
    }


class MadeUpSlurm:
    """squeue and scancel that come first in PATH. ``job`` puts a line into the queue; scancel is written down."""

    def __init__(self, folder: Path, monkeypatch: Any) -> None:
        self.folder = folder
        folder.mkdir()
        self.queue, self.calls = folder / "queue", folder / "calls"
        self.queue.touch()
        self.calls.touch()
        self.program("squeue", f"cat {self.queue}")
        self.program("scancel", f'echo "$@" >> {self.calls}')
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def program(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def job(self, job_id: str, state: str, nodes: str = "n[1-2]", reason: str = "None") -> None:
        self.queue.write_text(f"{job_id}|{state}|{nodes}|2|1:02:03|{reason}|2026-11-30T12:00:00\n")

"""A real run of one trainer rank on recorded rollouts, which can be told to be killed at any point.

Schedule, coordinator, trainer and checkpoints are the real ones; for the engine rank a thread hands in groups of files.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline.cli import compose_config
from pipeline.config import Config
from pipeline.engine.transfer import PHASES, SyncTimings
from pipeline.launch import team, trainer_rank
from pipeline.launch.rpc import RpcClient, RpcServer
from pipeline.launch.run_directory import Attempt, RunDirectory
from pipeline.records import Outcome, PolicyVersion, RolloutRecord, Row, Verdict
from pipeline.report.store import read_group, write_group

VOCABULARY = 97
GROUP_SIZE, GROUPS_PER_UPDATE = 3, 2
UNGRADED = 5  # every so many-th group never has a graded rollout: it is rolled again, then abandoned
WAIT_S = 300.0


def record(place: Path, groups: int) -> None:
    """A tiny model in ``place``/model and ``groups`` groups of rollouts in files beside it."""
    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
    Qwen3ForCausalLM(Qwen3Config(**shape, **heads)).save_pretrained(place / "model")
    for number in range(groups):
        name, graded = f"g{number:06d}", number % UNGRADED != UNGRADED - 1
        members = [_rollout(name, index, graded, np.random.default_rng((number, index))) for index in range(GROUP_SIZE)]
        write_group(place / f"{name}.parquet", members)


def _rollout(group: str, index: int, graded: bool, rng: np.random.Generator) -> RolloutRecord:
    length = int(rng.integers(12, 30))
    mask = np.arange(length) >= 6
    logprobs = np.where(mask, -4 - rng.random(length), 0).astype(np.float32)
    return RolloutRecord(
        rollout_id=f"{group}/{index}",
        group_id=group,
        index=index,
        task_id="",
        harness="",
        outcome=Outcome.SOLVED if graded else Outcome.INFRASTRUCTURE,
        verdict=Verdict(None, 1.0, 1) if graded else Verdict(None, None, 0, "recorded so"),
        rows=(Row(rng.integers(3, VOCABULARY, length).astype(np.int32), mask, logprobs),),
        version=PolicyVersion(0, 0),
        newest_version=PolicyVersion(0, 0),
        calls=1,
        malformed=0,
        undelivered=0,
        prompt_tokens=6,
        sampled_tokens=length - 6,
        wall_s=1.0,
    )


def configuration(run_dir: Path, recorded: Path, updates: int) -> Config:
    """Refill is off, and nothing goes stale: the schedule alone says which groups an update has. Old tokens go."""
    words = (
        f"+experiment=smoke run_dir={run_dir} model.path={recorded / 'model'} reward=test mix.harnesses=[pi,codex] "
        f"tasks.train_size=8 tasks.test_size=1 mix.set_aside_after=0 evaluation.before=false evaluation.after=false "
        f"algorithm.group_size={GROUP_SIZE} algorithm.groups_per_update={GROUPS_PER_UPDATE} "
        f"algorithm.max_outstanding_rollouts={3 * GROUP_SIZE * GROUPS_PER_UPDATE} algorithm.max_staleness=9 "
        f"algorithm.refill_factor=0 algorithm.max_rerolls=1 algorithm.minibatches=2 "
        f"training.updates={updates} training.checkpoint_every=3 training.token_budget=60 training.learning_rate=1e-3 "
        f"training.keep_every=6 storage.rollouts=0"
    )
    return compose_config(words.split())


class RecordedEngine(threading.Thread):
    """An engine rank as the coordinator sees one; its groups come from files."""

    def __init__(self, attempt: Attempt, recorded: Path) -> None:
        super().__init__(daemon=True)
        self.attempt, self.recorded = attempt, recorded
        self.version = PolicyVersion(0, 0)
        self.held: list[str] = []

    def run(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while (where := self.attempt.read("coordinator")) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        coordinator = RpcClient(where["url"], where["token"])
        control = RpcServer({"policy_version": self._take_version}, where["token"])
        coordinator.call("register", WAIT_S, engine="node0", url="", control_url=control.url)
        threading.Thread(target=self._beat, args=(RpcClient(where["url"], where["token"]),), daemon=True).start()
        while not (answer := coordinator.call("lease", WAIT_S, engine="node0", wait_s=1.0))["stop"]:
            if work := answer["work"]:
                self.held = [work["group_id"]]
                path = self._close(work)
                coordinator.call("close", WAIT_S, engine="node0", work=work, path=str(path))
                self.held = []

    def _beat(self, coordinator: RpcClient) -> None:
        while not coordinator.call("heartbeat", WAIT_S, engine="node0", stats={}, held=self.held)["stop"]:
            time.sleep(1.0)

    def _take_version(self, version: str) -> dict[str, Any]:
        self.version = PolicyVersion.parse(version)
        return {}

    def _close(self, work: dict[str, Any]) -> Path:
        """The group's file, as if its rollouts had been sampled just now."""
        now = {"version": self.version, "newest_version": self.version}
        own = {"harness": work["harness"], "task_id": work["task_id"]}
        records = [
            replace(record, **now, **own) for record in read_group(self.recorded / f"{work['group_id']}.parquet")
        ]
        path = self.attempt.groups / f"{work['group_id']}.parquet"
        write_group(path, records)
        return path


class NoTransfer:
    """There is no engine to push weights into; its rank is told their version."""

    def push(self, weights: Any, version: PolicyVersion, before_resume: Any) -> SyncTimings:
        before_resume()
        return SyncTimings(dict.fromkeys(PHASES, 0.0))

    def connect(self) -> None:
        pass

    def close(self) -> None:
        pass


class Fuse:
    """Counts what the process does with files of the run, and asks to be killed at number ``at`` (0: never)."""

    def __init__(self, line: Connection, run_dir: Path, at: int) -> None:
        self.line, self.place, self.at, self.count = line, str(run_dir), at, 0
        sys.addaudithook(self)

    def __call__(self, _: str, arguments: tuple[Any, ...]) -> None:
        first = arguments[0] if arguments else None
        if isinstance(first, str | os.PathLike) and str(first).startswith(self.place):
            self.count += 1
            if self.count == self.at:
                os.write(self.line.fileno(), b"!")

    def end(self) -> None:
        """The run is done: if it was to be killed, it waits for that."""
        if self.at > self.count:
            os.write(self.line.fileno(), b"!")
        if self.at:
            time.sleep(WAIT_S)


def run_attempt(run_dir: Path, recorded: Path, updates: int, line: Connection, kill_at: int) -> None:
    """One attempt of the run, from its newest checkpoint. Leaves how many events there were in ``run_dir``/events."""
    fuse = Fuse(line, run_dir, kill_at)
    team.make_transfer = lambda *_: NoTransfer()  # type: ignore[assignment, return-value]
    trainer_rank.ENGINE_STOP_S = 0.0
    attempt = RunDirectory(run_dir).new_attempt()
    RecordedEngine(attempt, recorded).start()
    trainer_rank.run_trainer(configuration(run_dir, recorded, updates), attempt)
    (run_dir / "events").write_text(str(fuse.count))
    fuse.end()

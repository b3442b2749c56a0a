"""Trainers of several nodes: every rank carries out the same orders, and pushes weights into its own node's engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import compose_config
from pipeline.engine.transfer import SyncTimings, TransferError
from pipeline.launch import team
from pipeline.launch.run_directory import RunDirectory
from pipeline.launch.team import Pushed, Target, TrainerTeam
from pipeline.records import PolicyVersion
from pipeline.training.checkpoint import CheckpointError

RANKS = 3
VERSION = PolicyVersion(1, 4)


class Meeting:
    """torch's collectives between threads: what rank 0 says, and what all say."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS, timeout=20)
        self.said: dict[int, Any] = {}
        self.rank = threading.local()

    def all(self, value: Any) -> list[Any]:
        self.barrier.wait()
        self.said[self.rank.number] = value
        self.barrier.wait()
        values = [self.said[rank] for rank in range(RANKS)]
        self.barrier.wait()
        return values


class FakeTrainer:
    """Notes what it was told to do."""

    ranks = RANKS

    def __init__(self) -> None:
        self.done: list[tuple[str, Any]] = []
        self.policy_version: PolicyVersion | None = None

    def update(self, groups: Any) -> dict[str, float]:
        self.done.append(("update", groups))
        return {"loss": 1.0}

    def save(self, root: Path, state: dict[str, Any], fence: Any) -> None:
        self.done.append(("save", state))
        if self.fails:
            raise CheckpointError("disk full")

    fails = False

    def export(self, target: Path) -> None:
        self.done.append(("export", target))

    def named_weights(self) -> list[Any]:
        self.done.append(("gather", None))
        return []


@pytest.fixture
def meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[TrainerTeam], Any]], list[Any]]:
    """Runs ``lead`` on rank 0 while the others follow; returns rank 0's result and every rank's trainer and team."""
    meeting = Meeting()
    monkeypatch.setattr(team.distributed, "from_rank_zero", lambda value: meeting.all(value)[0])
    monkeypatch.setattr(team.distributed, "from_all_ranks", meeting.all)
    config = compose_config([f"run_dir={tmp_path / 'run'}", "cluster=slurm", f"cluster.nodes={RANKS}"])
    attempt = RunDirectory(tmp_path / "run").new_attempt()
    attempt.publish("coordinator", {"url": "http://127.0.0.1:1", "token": "t"})
    teams = [TrainerTeam(config, attempt, rank, FakeTrainer()) for rank in range(RANKS)]  # type: ignore[arg-type]

    def run(lead: Callable[[TrainerTeam], Any]) -> list[Any]:
        def rank(number: int) -> Any:
            meeting.rank.number = number
            if number:
                return teams[number].follow()
            result = lead(teams[0])
            teams[0].end()
            return result

        with ThreadPoolExecutor(RANKS) as pool:
            results = list(pool.map(rank, range(RANKS)))
        for member in teams:
            member.close()
        return [results[0], *(member.trainer for member in teams)]

    return run


def test_every_rank_does_the_same_in_the_same_order(meet: Any, tmp_path: Path) -> None:
    def lead(first: TrainerTeam) -> dict[str, float]:
        metrics = first.update(["groups"], VERSION)  # type: ignore[list-item]
        first.save(tmp_path, {"flow": 1})
        first.export(tmp_path / "model")
        return metrics

    metrics, first, *others = meet(lead)
    assert metrics == {"loss": 1.0}
    assert first.done == [("update", ["groups"]), ("save", {"flow": 1}), ("export", tmp_path / "model")]
    for other in others:
        assert other.done == [("update", None), ("save", {}), ("export", tmp_path / "model")], (
            "rank 0 sends groups itself"
        )
        assert other.policy_version == VERSION


def test_the_others_wait_for_what_rank_0_makes_of_a_full_disk(meet: Any, tmp_path: Path) -> None:
    FakeTrainer.fails = True

    def lead(first: TrainerTeam) -> None:
        with pytest.raises(CheckpointError):
            first.save(tmp_path, {})
        FakeTrainer.fails = False
        first.save(tmp_path, {})

    _, first, second, third = meet(lead)
    assert [len(trainer.done) for trainer in (first, second, third)] == [2, 2, 2]


def test_each_rank_pushes_into_its_own_engine_only(meet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    connected: list[str] = []
    restarted: list[str] = []

    class FakeTransfer:
        def __init__(self, kind: str, url: str, scratch: Path, timeout_s: float) -> None:
            self.url = url

        def connect(self) -> None:
            connected.append(self.url)

        def push(self, weights: Any, version: PolicyVersion, before_resume: Any) -> SyncTimings:
            if self.url == "bad":
                raise TransferError("update_weights", "the engine is gone")
            return SyncTimings({"gather": 0.0, "load": float(self.url)})

        def close(self) -> None:
            pass

    class FakeClient:
        def __init__(self, url: str, token: str) -> None:
            self.url = url

        def call(self, method: str, *_: Any, **__: Any) -> dict[str, Any]:
            restarted.append(self.url)
            return {}

        def close(self) -> None:
            pass

    monkeypatch.setattr(team, "make_transfer", FakeTransfer)
    monkeypatch.setattr(team, "RpcClient", FakeClient)
    good = Target("node2", "2.5", "control2", fresh=False)
    bad = Target("node1", "bad", "control1", fresh=True)

    def lead(first: TrainerTeam) -> list[Pushed]:
        results = first.push([bad, good], VERSION)
        again = first.push([Target("node2", "2.5", "control2", fresh=False)], VERSION)
        return [*results, *again]

    results, *trainers = meet(lead)
    assert [(result.name, result.timings and result.timings.still_s) for result in results] == [
        ("node1", None),
        ("node2", pytest.approx(2.5)),
        ("node2", pytest.approx(2.5)),
    ]
    assert all(result.timings is None or result.timings.phases["gather"] > 0 for result in results)
    assert sorted(connected) == ["2.5", "bad"], "one connection as long as the engine lives"
    assert restarted == ["control1"]
    assert all(trainer.done == [("gather", None)] * 2 for trainer in trainers), "ZeRO-3 needs every rank to gather"

"""Which attempt a rank belongs to, and under which name its node is reached."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import ClusterConfig, UserError
from pipeline.launch import rendezvous
from pipeline.launch.rendezvous import agree_on_attempt, own_host
from pipeline.launch.run_directory import FencedOff, RunDirectory


@dataclass
class Environment:
    """What submitit tells a rank of itself."""

    global_rank: int
    job_id: str = "7"
    hostnames: list[str] = field(default_factory=lambda: ["n1", "n2"])


def agree(run: RunDirectory, rank: int, job_id: str = "7") -> Any:
    return agree_on_attempt(run, Environment(rank, job_id))  # type: ignore[arg-type]


def test_all_ranks_of_a_start_find_the_same_new_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    ghost = agree(run, 0)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    found: list[int] = []
    other = threading.Thread(target=lambda: found.append(agree(run, 3).number))
    other.start()  # before rank 0: it must not take the attempt of the job's first start
    assert agree(run, 0).number == 2
    other.join(20)
    assert found == [2]
    with pytest.raises(FencedOff):
        ghost.check_fence()


def test_another_job_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path)
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_S", 0.5)
    agree(run, 0, "8")
    with pytest.raises(TimeoutError, match="rank 0 of job 7"):
        agree(run, 1, "7")


def test_a_nodes_name_must_be_known() -> None:
    assert own_host(ClusterConfig(nodes=1, host="not.a.host.invalid")) == "127.0.0.1"
    assert own_host(ClusterConfig(nodes=2, host="localhost")) == "localhost"
    with pytest.raises(UserError, match=r"cluster\.host"):
        own_host(ClusterConfig(nodes=2, host="not.a.host.invalid"))

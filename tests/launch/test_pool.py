"""Several engines on one node: what each has for itself, and that one which dies costs nothing but its place."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
from evaluation_helpers import graded, settings
from waiting import LONG_S, wait_for

from pipeline.config import Config, UserError
from pipeline.engine.server import EngineError
from pipeline.launch import engine_rank as engine_module
from pipeline.launch import pool
from pipeline.launch.engine_rank import EngineRank
from pipeline.launch.run_directory import Attempt, RunDirectory
from pipeline.launch.standalone import drive
from pipeline.records import GroupSpec, RolloutRecord, TaskRef
from pipeline.stages.evaluation import Cells, evaluation_specs

CELLS = 6


class Server:
    """vLLM as its rank sees it. ``back``: a start ends when it is set, or ``stop`` is called."""

    def __init__(self, log_path: Path) -> None:
        self.url, self.log_path = "http://none", log_path
        self.lives, self.starts = False, 0
        self.back = threading.Event()
        self.back.set()
        self.broken = False

    def start(self, *_: object) -> None:
        self.starts += 1
        self.lives = True

    def wait_ready(self, deadline_s: float) -> None:
        assert self.back.wait(LONG_S)
        if self.broken:
            self.lives = False
            raise EngineError("the engine died while starting")

    def warm_up(self) -> None:
        pass

    def alive(self) -> bool:
        return self.lives

    def stop(self) -> None:
        self.lives = False

    def close(self) -> None:
        self.lives = False
        self.back.set()


class Workshop:
    """The first rollout of a cell ends at once, the others when the node's ``go`` is set and its engine lives."""

    def __init__(self, node: Node, server: Server) -> None:
        self.node, self.server = node, server
        self.harness_home, self.counters = Path("/"), Counter[str]()

    async def roll_out(self, spec: GroupSpec, index: int) -> RolloutRecord:
        self.node.begun[spec.group_id, index] += 1
        while index and not (self.node.go.is_set() and self.server.lives):
            await asyncio.sleep(0.01)
        self.node.ended[spec.group_id, index] += 1
        return replace(graded(spec.task.task_id, spec.harness, index), group_id=spec.group_id)


class Rank(EngineRank):
    """Without vLLM, shards and sandboxes."""

    node: Node

    def _make_server(self, node: int, devices: str | None) -> Server:  # type: ignore[override]
        return Server(self.attempt.logs / "vllm.log")

    def _make_supervisor(self) -> Mock:
        return Mock(start=AsyncMock(), stop=AsyncMock(), stats=dict, set_policy_version=AsyncMock())

    def _workshop(self) -> Workshop:  # type: ignore[override]
        return Workshop(self.node, self.server)  # type: ignore[arg-type]


class Node:
    """Two pooled engines at work on CELLS cells of two rollouts, none of which may be tried twice."""

    def __init__(self, root: Path, restarts: int = 5) -> None:
        self.go = threading.Event()
        self.begun: Counter[tuple[str, int]] = Counter()
        self.ended: Counter[tuple[str, int]] = Counter()
        config = settings(root / "run", "concurrency=2", f"engine.max_restarts={restarts}", "logging.progress=false")
        self.run = RunDirectory(root / "run")
        tasks = [TaskRef(f"t{number}", root) for number in range(CELLS)]
        self.cells = Cells(self.run.evaluation("x"), evaluation_specs(tasks, ["pi"], 2), retries=0)
        attempt: Attempt = self.run.new_attempt()
        self.ranks = [Rank(config, attempt, number, pooled=True) for number in range(2)]
        for rank in self.ranks:
            rank.node = self
        self.failure: BaseException | None = None
        self._work: Callable[[], None] = lambda: drive(config, attempt, self.cells, self.ranks, lambda *_: None)
        self._thread = threading.Thread(target=self._until_done)
        self._thread.start()

    def _until_done(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.failure = error

    def server(self, number: int) -> Server:
        found = self.ranks[number].server
        assert isinstance(found, Server)
        return found

    def has_cells(self, number: int) -> bool:
        return bool(self.ranks[number].groups)

    def done(self) -> None:
        self._thread.join(LONG_S)
        assert not self._thread.is_alive()


@pytest.fixture(autouse=True)
def no_vllm_and_no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "refuse_engine", lambda *_: None)
    monkeypatch.setattr(engine_module, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(engine_module, "WATCH_S", 0.05)


def test_the_cells_of_an_engine_that_dies_go_to_the_other_one_and_cost_no_try(tmp_path: Path) -> None:
    node = Node(tmp_path)
    wait_for(lambda: node.has_cells(0) and node.has_cells(1) and len(node.ended) >= 2)
    node.server(0).back.clear()  # it does not come back before the end
    node.server(0).lives = False
    wait_for(lambda: node.server(0).starts == 2)
    assert not node.has_cells(0), "they were given back before the restart"
    node.go.set()
    node.done()
    assert node.failure is None
    assert node.cells.coverage().complete, "with no second try"
    indices = [(record.group_id, record.index) for record in node.cells.records()]
    assert len(indices) == len(set(indices)) == 2 * CELLS
    assert set(node.ended.values()) == {1}, "what had ended of a cell was not done again"
    assert max(node.begun.values()) == 2, "the other half of a given-back cell was"


def test_an_engine_that_comes_back_gets_cells_again(tmp_path: Path) -> None:
    node = Node(tmp_path, restarts=100_000)
    wait_for(lambda: node.has_cells(0) and node.has_cells(1))
    node.server(0).broken = True
    node.server(0).lives = False
    wait_for(lambda: node.server(0).starts >= 3)  # a start that fails is one restart more
    node.server(0).broken = False
    wait_for(lambda: node.has_cells(0))
    node.go.set()
    node.done()
    assert node.failure is None and node.cells.coverage().complete


def test_the_rest_goes_on_without_an_engine_that_cannot_be_kept_alive(tmp_path: Path) -> None:
    node = Node(tmp_path, restarts=0)
    wait_for(lambda: node.has_cells(0) and node.has_cells(1))
    node.server(1).lives = False
    wait_for(lambda: not node.has_cells(1))
    node.go.set()
    node.done()
    assert node.failure is None and node.cells.coverage().complete
    assert node.server(1).starts == 1


def test_without_any_engine_it_ends_with_the_last_one_s_word(tmp_path: Path) -> None:
    node = Node(tmp_path, restarts=0)
    wait_for(lambda: node.has_cells(0) and node.has_cells(1))
    for number in range(2):
        node.server(number).lives = False
    node.done()
    assert "vLLM died 1 times" in str(node.failure)
    found = node.cells.coverage()
    assert 0 < found.graded < found.planned, "what had ended is kept"


def test_a_wrong_setting_ends_all_at_once() -> None:
    class Refuses:
        name = "node0"

        async def run(self) -> None:
            raise UserError("wrong")

    class Waits:
        name, ended = "node1", False

        async def run(self) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                self.ended = True

    waits = Waits()
    with pytest.raises(UserError, match="wrong"):
        asyncio.run(pool.serve([Refuses(), waits], lambda name: None))  # type: ignore[list-item]
    assert waits.ended


def pooled(tmp_path: Path, *words: str) -> Config:
    return settings(tmp_path / "run", *words)


def test_gpus_slots_and_ports_are_shared_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "on_gpu", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-a,7")
    found = pool.replicas(pooled(tmp_path, "concurrency=10", "engine.port=8000"))
    assert [one.devices for one in found] == ["4", "5", "GPU-a", "7"]
    assert [one.config.concurrency for one in found] == [3, 3, 2, 2]
    assert [one.config.engine.port for one in found] == [8000, 8001, 8002, 8003]
    two = pool.replicas(pooled(tmp_path, "concurrency=10", "evaluation.replicas=2"))
    assert [one.devices for one in two] == ["4,5", "GPU-a,7"], "tensor parallelism inside each"
    assert [one.config.engine.port for one in two] == [0, 0]
    with pytest.raises(UserError, match=r"evaluation\.replicas=5: this node shows 4 GPUs"):
        pool.replicas(pooled(tmp_path, "concurrency=10", "evaluation.replicas=5"))
    assert len(pool.replicas(pooled(tmp_path, "concurrency=3"))) == 3, "no engine without a slot"


def test_on_a_cpu_it_is_one_engine_unless_more_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "on_gpu", lambda: False)
    (one,) = pool.replicas(pooled(tmp_path, "engine.omp_threads=4"))
    assert (one.devices, one.config.engine.omp_threads, one.config.concurrency) == (None, 4, 4)
    three = pool.replicas(pooled(tmp_path, "engine.omp_threads=4", "evaluation.replicas=3"))
    assert [one.config.engine.omp_threads for one in three] == [1, 1, 1]
    assert [one.config.concurrency for one in three] == [2, 1, 1]
    with pytest.raises(UserError, match=r"evaluation\.replicas=5 share concurrency=4"):
        pool.replicas(pooled(tmp_path, "evaluation.replicas=5"))

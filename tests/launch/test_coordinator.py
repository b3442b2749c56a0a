"""Leases that go astray: the answer is lost on the way, or an engine rank is started anew before it is missed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cli import compose_config
from pipeline.launch.coordinator import AUDIT_S, Coordinator
from pipeline.launch.run_directory import RunDirectory
from pipeline.records import TaskRef
from pipeline.stages.evaluation import Cells, evaluation_specs
from pipeline.stages.flow import FlowState, GroupFlow
from pipeline.stages.schedule import make_schedule

TASKS = [TaskRef(f"t{number}", Path(f"t{number}")) for number in range(4)]
SILENCE_S = 30.0


class Clock:
    """Seconds, moved on by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["train", "evaluate"])
def ready(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Coordinator, Clock]:
    """A coordinator whose one engine rank may be given groups, or cells."""
    config, clock = compose_config(["mix.harnesses=[pi]"]), Clock()
    flow = GroupFlow(make_schedule(TASKS, config), config.algorithm, 4, FlowState(), 1)
    coordinator = Coordinator(config, RunDirectory(tmp_path).new_attempt(), flow, clock)
    coordinator.register("node0", "", "")
    coordinator.set_weights(coordinator.engines["node0"], "1.0")
    coordinator.set_phase("train")
    if request.param == "evaluate":
        coordinator.evaluate(Cells(tmp_path / "evaluation", evaluation_specs(TASKS, ["pi"], 2), retries=1))
    return coordinator, clock


def audit(coordinator: Coordinator, clock: Clock, held: list[str], heard: bool = True) -> None:
    clock.now += AUDIT_S
    if heard:
        coordinator.heartbeat("node0", {}, held)
    assert coordinator.lost_engines(SILENCE_S) == []


def test_a_lease_that_its_engine_rank_does_not_know_of_is_given_again(ready: tuple[Coordinator, Clock]) -> None:
    coordinator, clock = ready
    lost, known = (coordinator.lease("node0", 0.0)["work"]["group_id"] for _ in range(2))
    audit(coordinator, clock, [known])
    assert [coordinator.lease("node0", 0.0)["work"]["group_id"] for _ in range(2)].count(lost) == 0, (
        "it may be on its way"
    )
    audit(coordinator, clock, [known])
    again = [work["group_id"] for _ in range(6) if (work := coordinator.lease("node0", 0.0)["work"])]
    assert again.count(lost) == 1 and known not in again


def test_old_news_of_an_engine_rank_take_nothing_from_it(ready: tuple[Coordinator, Clock]) -> None:
    coordinator, clock = ready
    coordinator.heartbeat("node0", {}, [])
    lease = coordinator.lease("node0", 0.0)["work"]["group_id"]
    for _ in range(2):  # the network is slow: no heartbeat since
        audit(coordinator, clock, [], heard=False)
    again = [work["group_id"] for _ in range(8) if (work := coordinator.lease("node0", 0.0)["work"])]
    assert lease not in again

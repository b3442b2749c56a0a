"""Leases: those that go astray (the answer is lost on the way, an engine rank is started anew before it is missed) are
taken back; those that wait are woken when there may be something for them, and only then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import compose_config
from pipeline.launch.coordinator import AUDIT_S, Coordinator
from pipeline.launch.run_directory import RunDirectory
from pipeline.records import Outcome, PolicyVersion, RolloutRecord, TaskRef, Verdict
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


WAITING = 4
DEADLINE_S = 60.0


def test_leases_wait_for_credit_and_for_nothing_else(tmp_path: Path) -> None:
    """What a closed group holds is freed when it is taken for an update, or is skipped; not when it is admitted."""
    config = compose_config(
        "mix.harnesses=[pi] algorithm.group_size=2 algorithm.max_outstanding_rollouts=4 "
        "algorithm.groups_per_update=2 reward=test".split()
    )
    flow = GroupFlow(make_schedule(TASKS, config), config.algorithm, 4, FlowState(), 1)
    coordinator = Coordinator(config, RunDirectory(tmp_path).new_attempt(), flow)
    coordinator.register("node0", "", "")
    coordinator.set_weights(coordinator.engines["node0"], "1.0")
    coordinator.set_phase("train")
    works = [coordinator.lease("node0", 0.0)["work"] for _ in range(2)]
    asked, answers = count_asking(coordinator), []
    leases = [
        threading.Thread(target=lambda: answers.append(coordinator.lease("node0", DEADLINE_S))) for _ in range(WAITING)
    ]
    for lease in leases:
        lease.start()
    wait_until(lambda: len(asked) == WAITING)
    for work in works:
        coordinator.take_back("node0", work, records(work))
    assert coordinator.take_batch() is not None
    wait_until(lambda: len(answers) == 2)
    wait_until(lambda: len(asked) == 2 * WAITING)
    coordinator.stop()
    for lease in leases:
        lease.join(DEADLINE_S)
    given = [answer["work"]["group_id"] for answer in answers if answer["work"]]
    assert len(given) == 2 and len(asked) == 2 * WAITING, "admitting woke nobody"


def count_asking(coordinator: Coordinator) -> list[str]:
    """Grows whenever the coordinator looks for work for someone."""
    asked: list[str] = []
    real = coordinator._work_for

    def counted(engine: str) -> dict[str, object] | None:
        asked.append(engine)
        return real(engine)

    coordinator._work_for = counted  # type: ignore[method-assign]
    return asked


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def records(work: dict[str, Any]) -> tuple[RolloutRecord, ...]:
    version = PolicyVersion(1, 0)
    return tuple(
        RolloutRecord(
            f"r{index}", work["group_id"], index, work["task_id"], "pi", Outcome.SOLVED, Verdict(None, 1.0, 1), (),
            version, version, 1, 0, 0, 1, 1, 1.0,
        )
        for index in work["indices"]
    )  # fmt: skip

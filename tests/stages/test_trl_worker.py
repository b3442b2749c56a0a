"""TRL's rollout worker protocol: what reaches the trainer, what is held back, how it starts, fails and ends."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from trl_helpers import VOCABULARY, Worker, accelerate_of_its_own
from waiting import LONG_S, wait_for

from pipeline.config import UserError
from pipeline.harness.base import HarnessRecipe
from pipeline.records import GroupSpec, PolicyVersion, RolloutRecord
from pipeline.stages import trl_worker
from pipeline.stages.trl_worker import TICK_S

pytestmark = pytest.mark.slow  # TRL takes seconds to import
GROUP = 4
ROWS = 1 + 2 + 3 + 4  # of a group


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HarnessRecipe, "check_installed", lambda self, root: None)


def right_and_wrong(spec: GroupSpec, index: int) -> float | None:
    return float(index % 2)


@contextmanager
def running(worker: Worker) -> Iterator[Worker]:
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()
        assert not worker._thread.is_alive() and worker.rollouts.open == 0


def taken(worker: Worker, count: int) -> list[Any]:
    return [worker.rollout_buffer.get(timeout=LONG_S) for _ in range(count)]


class Counts:
    """Sums of what the worker measured so far."""

    def __init__(self, worker: Worker) -> None:
        self.queue, self.sums = worker.metrics_queue, defaultdict[str, float](float)

    def __getitem__(self, name: str) -> float:
        with suppress(queue.Empty):
            while True:
                for key, value in self.queue.get_nowait().items():
                    self.sums[key] += value[0] if isinstance(value, tuple) else value
        return self.sums[name]


@pytest.fixture
def accelerate_state() -> Iterator[None]:
    with accelerate_of_its_own():
        yield


def test_it_has_every_part_of_trl_s_protocol(tmp_path: Path) -> None:
    from trl.experimental.async_grpo.async_grpo_trainer import RolloutWorkerProtocol

    worker = Worker(tmp_path, right_and_wrong)
    methods = {name: part for name, part in vars(RolloutWorkerProtocol).items() if inspect.isfunction(part)}
    methods = {name: part for name, part in methods.items() if not name.startswith("_")}
    assert set(methods) == {"start", "stop", "update_model_version", "check_health"}
    for name, method in methods.items():
        mine = inspect.signature(getattr(type(worker), name)).parameters
        assert list(mine) == list(inspect.signature(method).parameters)
    assert all(hasattr(worker, name) for name in RolloutWorkerProtocol.__annotations__)


def test_groups_come_whole_with_their_group_s_advantage(tmp_path: Path) -> None:
    with running(Worker(tmp_path, right_and_wrong, "algorithm.aggregation=token_mean")) as worker:
        came = taken(worker, 3 * ROWS)
    for number in range(3):
        own = came[number * ROWS : (number + 1) * ROWS]
        assert {sample.group_id for sample in own} == {number}
        rewards = [sample.metrics["reward"] for sample in own]
        assert [r > 0 for r in rewards] == [False] + 2 * [True] + 3 * [False] + 4 * [True]
        mean = max(rewards) / 2  # over rollouts, not over rows
        assert [sample.advantage for sample in own] == pytest.approx([reward - mean for reward in rewards])
    assert {sample.prompt[0]["content"] for sample in came} <= set(worker._prompts.values())


def test_ungraded_rollouts_are_left_out(tmp_path: Path) -> None:
    script = {0: None, 1: 1.0, 2: 0.0, 3: 0.0}
    with running(Worker(tmp_path, lambda spec, index: script[index])) as worker:
        came = taken(worker, ROWS - 1)
        counts = Counts(worker)
        wait_for(lambda: counts["rollout/ungraded_total"])
    assert {sample.group_id for sample in came} == {0}
    advantages = {round(sample.advantage / sample.metrics["sample/loss_weight"], 6) for sample in came}
    reward = max(sample.metrics["reward"] for sample in came)
    assert advantages == {round(reward * 2 / 3, 6), round(-reward / 3, 6)}, "the baseline is over the graded ones"


def test_groups_without_contrast_are_left_out_and_counted(tmp_path: Path) -> None:
    def script(spec: GroupSpec, index: int) -> float:
        return float(index % 2) if int(spec.group_id[1:]) % 2 else 1.0

    with running(Worker(tmp_path, script)) as worker:
        came = taken(worker, 2 * ROWS)
        counts = Counts(worker)
        wait_for(lambda: counts["rollout/groups_without_contrast_total"] >= 2)
    assert {sample.group_id for sample in came} == {0, 1}
    assert {worker.flow.state.ended[f"g{number:06}"][0] for number in (0, 2)} == {"skipped"}


def test_too_few_graded_are_rolled_again_then_abandoned(tmp_path: Path) -> None:
    tries: dict[str, int] = defaultdict(int)

    def script(spec: GroupSpec, index: int) -> float | None:
        tries[spec.group_id] += index == 0
        return None if spec.group_id == "g000000" and index else float(index % 2)

    with running(Worker(tmp_path, script, "algorithm.max_rerolls=2", "mix.set_aside_after=0")) as worker:
        counts = Counts(worker)
        wait_for(lambda: counts["rollout/groups_abandoned_total"])
    assert worker.flow.state.ended["g000000"][0] == "abandoned" and tries["g000000"] == 3
    assert counts["rollout/groups_rolled_again_total"] == 2


def test_a_trainer_that_does_not_take_them_holds_rollouts_back(tmp_path: Path) -> None:
    with running(Worker(tmp_path, right_and_wrong, f"algorithm.max_outstanding_rollouts={3 * GROUP}")) as worker:
        wait_for(lambda: worker.rollout_buffer.qsize() == 3 * ROWS)
        for done in (3, 4):
            time.sleep(3 * TICK_S)  # it would go on meanwhile
            assert worker.rollouts.begun == done * GROUP and worker.rollout_buffer.qsize() == 3 * ROWS
            taken(worker, ROWS - 1)
            time.sleep(3 * TICK_S)
            assert worker.rollouts.begun == done * GROUP, "a group counts until its last row is taken"
            taken(worker, 1)
            wait_for(lambda: worker.rollout_buffer.qsize() == 3 * ROWS)
        worker.check_health(LONG_S)
    assert [ending for ending, _ in worker.flow.state.ended.values()] == ["trained"] * 2


def test_no_more_rollouts_at_once_than_told(tmp_path: Path) -> None:
    most = 0

    def script(spec: GroupSpec, index: int) -> float:
        nonlocal most
        most = max(most, worker.rollouts.open)
        return float(index % 2)

    worker = Worker(tmp_path, script, "concurrency=3")
    with running(worker):
        taken(worker, 4 * ROWS)
    assert most == 3


def test_a_group_is_of_the_oldest_version_that_sampled_it(tmp_path: Path) -> None:
    worker = Worker(tmp_path, right_and_wrong, f"algorithm.max_outstanding_rollouts={GROUP}", "concurrency=2")
    worker.update_model_version(1)  # TRL syncs once before it starts the worker
    hold = worker.rollouts.hold = asyncio.Event()
    with running(worker):
        wait_for(lambda: worker.rollouts.open == 2)
        worker.update_model_version(2)
        assert worker.rollouts.version == PolicyVersion(0, 2)
        assert worker._main is not None
        worker._main.get_loop().call_soon_threadsafe(hold.set)
        first = taken(worker, ROWS)
        second = taken(worker, ROWS)
    assert {sample.model_version for sample in first} == {1}, "two of its rollouts are of version 2"
    assert {sample.model_version for sample in second} == {2}


def test_trl_drops_what_is_too_stale(tmp_path: Path, accelerate_state: None) -> None:
    with running(Worker(tmp_path, right_and_wrong)) as worker:
        wait_for(lambda: worker.rollout_buffer.qsize() >= ROWS)
        worker.update_model_version(5)
        sunk: dict[str, list[Any]] = defaultdict(list)
        sample = next(iter(trl_queue(worker, lambda: 5, sunk, max_staleness=4)))
        assert sample["group_id"] > 0 and len(sunk["sample/dropped_stale_total"]) >= ROWS
        assert sunk["sample/staleness_max"][-1] <= 4


def trl_queue(worker: Worker, version: Any, sunk: dict[str, list[Any]], **more: Any) -> Any:
    """TRL's data set on the worker's queue, which looks after its health often."""
    from trl.experimental.async_grpo.async_grpo_trainer import RolloutQueueDataset

    more = {"poll_interval_s": 0.1} | more
    return RolloutQueueDataset(worker.rollout_buffer, version, worker.check_health, LONG_S, sunk, **more)


def test_an_error_of_the_worker_is_raised_where_trl_waits_for_samples(tmp_path: Path, accelerate_state: None) -> None:
    def script(spec: GroupSpec, index: int) -> float:
        if spec.group_id == "g000001" and index == 2:
            raise OSError("the disk is gone")
        return float(index % 2)

    with running(Worker(tmp_path, script)) as worker, pytest.raises(RuntimeError, match="the disk is gone") as raised:
        for sample in trl_queue(worker, lambda: 0, defaultdict(list)):
            assert set(sample["input_ids"]) < set(range(VOCABULARY))
    assert isinstance(raised.value.__cause__, OSError)
    worker.update_model_version(1)  # does not wait for a thread that has ended


@pytest.mark.parametrize("trouble", [UserError("no list of models"), OSError("no room")])
def test_what_is_in_the_way_of_a_start_is_raised_by_start(trouble: Exception, tmp_path: Path) -> None:
    worker = Worker(tmp_path, right_and_wrong)
    worker.trouble = trouble
    with pytest.raises(type(trouble), match=str(trouble)):
        worker.start()
    worker.stop()
    with pytest.raises(RuntimeError, match=str(trouble)):
        worker.check_health(LONG_S)


def test_a_start_that_hangs_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(version: PolicyVersion) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(trl_worker, "START_S", 0.3)
    worker = Worker(tmp_path, right_and_wrong)
    worker.rollouts.set_policy_version = hang  # type: ignore[method-assign]
    with pytest.raises(TimeoutError, match=r"waited 0\.3 s for the proxy"):
        worker.start()
    assert worker._thread is not None and not worker._thread.is_alive()


def test_shards_that_do_not_take_a_version_are_not_waited_for_ever(tmp_path: Path) -> None:
    async def hang(version: PolicyVersion, deadline_s: float) -> None:
        await asyncio.Event().wait()

    with running(Worker(tmp_path, right_and_wrong, "engine.sync_timeout_s=0.2")) as worker:
        worker.rollouts.set_policy_version = hang  # type: ignore[method-assign]
        with pytest.raises(TimeoutError, match="rollouts to take version 3"):
            worker.update_model_version(3)


def test_harnesses_that_all_fail_end_it(tmp_path: Path) -> None:
    def script(spec: GroupSpec, index: int) -> None:
        return None

    with running(Worker(tmp_path, script)) as worker, pytest.raises(RuntimeError, match="every harness keeps failing"):
        next(iter(trl_queue(worker, lambda: 0, defaultdict(list))))


def test_nothing_left_to_learn_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_worker, "MOST_FRUITLESS", 12)

    def script(spec: GroupSpec, index: int) -> float:
        return 1.0

    with (
        running(Worker(tmp_path, script)) as worker,
        pytest.raises(RuntimeError, match=r"from \d+ groups in a row, the last one: no contrast"),
    ):
        next(iter(trl_queue(worker, lambda: 0, defaultdict(list))))


def broken_reward(outcome: RolloutRecord) -> float:
    raise ZeroDivisionError("by the user")


def test_a_reward_function_that_fails_ends_it(tmp_path: Path) -> None:
    worker = Worker(tmp_path, right_and_wrong, f"reward.fn={__name__}:broken_reward")
    with running(worker), pytest.raises(RuntimeError, match="by the user") as raised:
        next(iter(trl_queue(worker, lambda: 0, defaultdict(list))))
    assert isinstance(raised.value.__cause__, UserError)


def test_a_silent_thread_is_told(tmp_path: Path) -> None:
    going_on = threading.Event()

    def script(spec: GroupSpec, index: int) -> float:
        assert going_on.wait(LONG_S)
        return float(index % 2)

    with running(Worker(tmp_path, script)) as worker:
        wait_for(lambda: worker.rollouts.open)
        time.sleep(0.5)
        with pytest.raises(RuntimeError, match="was silent for"):
            worker.check_health(0.4)
        worker.check_health(LONG_S)
        going_on.set()
        taken(worker, ROWS)


def test_stop_ends_rollouts_under_way(tmp_path: Path) -> None:
    worker = Worker(tmp_path, right_and_wrong)
    worker.rollouts.hold = asyncio.Event()
    with running(worker):
        wait_for(lambda: worker.rollouts.open == 16)
        with pytest.raises(queue.Empty):
            worker.rollout_buffer.get_nowait()
    worker.stop()  # once more does nothing
    with pytest.raises(RuntimeError, match="not running"):
        worker.check_health(LONG_S)
    with pytest.raises(RuntimeError, match="started before"):
        worker.start()


def test_before_its_start_nothing_runs(tmp_path: Path) -> None:
    worker = Worker(tmp_path, right_and_wrong)
    worker.stop()
    with pytest.raises(RuntimeError, match="not running"):
        worker.check_health(LONG_S)
    assert worker.rollouts.begun == 0


def test_a_resumed_training_goes_on_in_the_schedule(tmp_path: Path) -> None:
    seen = []

    def script(spec: GroupSpec, index: int) -> float:
        seen.append(spec.group_id)
        return float(index % 2)

    with running(Worker(tmp_path, script, first_group=7)) as worker:
        taken(worker, ROWS)
    assert seen[0] == "g000007" and min(seen) == "g000007"


def test_metrics_nobody_reads_do_not_pile_up(tmp_path: Path) -> None:
    worker = Worker(tmp_path, right_and_wrong)
    worker.metrics_queue = queue.Queue(2)
    with running(worker):
        taken(worker, 4 * ROWS)
    assert worker.metrics_queue.qsize() == 2

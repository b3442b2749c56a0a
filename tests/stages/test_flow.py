"""Group flow: every scheduled group ends exactly once, staleness stays bounded, nothing is lost over a crash."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import AlgorithmConfig
from pipeline.records import Outcome, PolicyVersion, RolloutRecord, TaskRef, TrainGroup, Verdict
from pipeline.stages.flow import Ending, FlowState, GroupFlow, is_ancestor
from pipeline.stages.schedule import Schedule

TASKS = [TaskRef(f"t{i}", Path(f"/tasks/t{i}")) for i in range(7)]


def schedule(seed: int = 0, harnesses: tuple[str, ...] = ("a", "b", "c"), size: int = 4) -> Schedule:
    return Schedule(TASKS, harnesses, size, seed)


def algorithm(**changes: object) -> AlgorithmConfig:
    values: dict[str, object] = dict(
        group_size=4, groups_per_update=2, max_outstanding_rollouts=24, max_staleness=2, stale_wait_s=10.0
    )
    return AlgorithmConfig(**(values | changes))  # type: ignore[arg-type]


def group(group_id: str, version: PolicyVersion) -> TrainGroup:
    record = RolloutRecord(
        "r", group_id, 0, "t", "a", Outcome.SOLVED, Verdict(1.0, 1.0, 1), (), version, version, 1, 0, 0, 1, 1, 0.1
    )
    return TrainGroup(group_id, "a", (record,), (0.5,))


def new_flow(
    config: AlgorithmConfig | None = None,
    state: FlowState | None = None,
    attempt: int = 1,
    updates: int = 6,
    set_aside_after: int = 2,
) -> GroupFlow:
    return GroupFlow(schedule(), config or algorithm(), updates, state or FlowState(), attempt, set_aside_after)


def lease_all(flow: GroupFlow) -> list[str]:
    leased = []
    while (lease := flow.lease("node0", flow.version)) is not None:
        leased.append(lease.spec.group_id)
    return leased


def test_credits_bound_outstanding_rollouts() -> None:
    flow = new_flow(algorithm(max_outstanding_rollouts=9))
    assert len(lease_all(flow)) == 2, "two groups of four fit into nine credits"
    flow.admit(group("g000000", flow.version), flow.version)
    assert flow.lease("node0", flow.version) is None, "a closed group holds its credit until it is trained"


def test_no_more_groups_than_the_remaining_updates_need() -> None:
    flow = new_flow(updates=1)
    assert len(lease_all(flow)) == 2


def test_no_group_is_handed_out_while_the_last_update_is_made() -> None:
    flow = new_flow(updates=1)
    for group_id in lease_all(flow):
        flow.admit(group(group_id, flow.version), flow.version)
    assert flow.take_batch(0.0) is not None
    assert flow.lease("node0", flow.version) is None, "it could only be abandoned"


def test_group_without_contrast_is_replaced_until_refills_are_used_up() -> None:
    flow = new_flow(algorithm(refill_factor=1.0))
    for _ in range(2):
        flow.skip(lease_all(flow)[0] if not flow.leases else next(iter(flow.leases)), "no contrast")
    lease_all(flow)
    flow.admit(group(next(iter(flow.leases)), flow.version), flow.version)
    assert flow.take_batch(0.0) is None, "two skipped, two refills: the update still waits for two groups"
    flow.skip(next(iter(flow.leases)), "no contrast")
    batch = flow.take_batch(0.0)
    assert batch is not None and len(batch) == 1, "three skipped, two refills: one group is enough"
    flow.finish_update(batch)
    lease_all(flow)
    assert flow.take_batch(0.0) is None, "the next update begins with all its refills"


def test_stale_groups_are_waited_for_then_dropped_whole_and_scheduled_again() -> None:
    flow = new_flow(algorithm(max_staleness=1))
    slow = flow.lease("node0", flow.version)
    assert slow is not None
    for update in range(2):
        for _ in range(2):
            lease = flow.lease("node0", flow.version)
            assert lease is not None
            flow.admit(group(lease.spec.group_id, flow.version), flow.version)
        if update == 0:
            batch = flow.take_batch(0.0)
            assert batch is not None
            flow.finish_update(batch)
    assert flow.take_batch(100.0) is None, "the next step would make the slow group stale: wait"
    assert flow.take_batch(109.9) is None
    batch = flow.take_batch(110.0)
    assert batch is not None and len(batch) == 2
    assert not flow.holds(slow.spec.group_id, slow.lease_id), "its late result will be ignored"
    assert flow.dropped_stale == 1
    again = flow.lease("node0", flow.version)
    assert again is not None and again.spec == slow.spec and again.lease_id != slow.lease_id


def test_a_group_that_keeps_failing_is_abandoned_with_the_reason() -> None:
    flow = new_flow(algorithm(max_rerolls=1))
    lease = flow.lease("node0", flow.version)
    assert lease is not None
    assert flow.fail(lease.spec.group_id, "the engine did not answer") is True
    again = flow.lease("node0", flow.version)
    assert again is not None and again.spec == lease.spec
    assert flow.fail(again.spec.group_id, "the engine did not answer") is False
    assert flow.state.ended[lease.spec.group_id] == [Ending.ABANDONED, "the engine did not answer"]


def test_groups_of_a_lost_engine_are_leased_again() -> None:
    flow = new_flow()
    first = flow.lease("node0", flow.version)
    other = flow.lease("node1", flow.version)
    assert first is not None and other is not None
    flow.release_engine("node0")
    again = flow.lease("node1", flow.version)
    assert again is not None and again.spec == first.spec
    assert flow.holds(other.spec.group_id, other.lease_id)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_group_ends_exactly_once_whatever_happens(data: st.DataObject) -> None:
    """Random closes, skips, failures, lost engines and crashes: what survives is trained once, and nothing is lost."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    config = algorithm(max_staleness=int(rng.integers(1, 4)), stale_wait_s=3.0, max_rerolls=2)
    saved, attempt, clock = FlowState().to_json(), 1, 0.0
    flow = new_flow(config, FlowState.from_json(_copy(saved)), attempt, updates=5)
    trained: dict[str, int] = {}
    saved_trained: dict[str, int] = {}
    for _ in range(4000):
        clock += 1.0
        event = rng.random()
        lease = flow.lease("node0", flow.version)
        if event < 0.02:  # crash: everything since the checkpoint is forgotten
            attempt += 1
            flow = new_flow(config, FlowState.from_json(_copy(saved)), attempt, updates=5)
            trained = dict(saved_trained)
            continue
        if event < 0.05:
            flow.release_engine("node0")
        elif flow.leases and event < 0.8:
            chosen = flow.leases[str(rng.choice(sorted(flow.leases)))]
            fate = rng.random()
            if fate < 0.7:
                oldest = max(0, chosen.floor.n - int(rng.integers(0, 2)))  # kept from an earlier attempt
                version = PolicyVersion(attempt, int(rng.integers(oldest, flow.version.n + 1)))
                flow.admit(group(chosen.spec.group_id, version), version)
            elif fate < 0.9:
                flow.skip(chosen.spec.group_id, "no contrast")
            else:
                flow.judge_harness(chosen.spec.harness, bool(rng.random() < 0.8), "infrastructure")
                flow.fail(chosen.spec.group_id, "infrastructure")
            if flow.stranded:
                flow.readmit(["a", "b"])
        batch = flow.take_batch(clock)
        if batch is not None:
            assert all(0 <= age <= config.max_staleness for age in flow.staleness(batch))
            for ready in batch:
                assert ready.group.group_id not in trained, "no group is trained twice"
                trained[ready.group.group_id] = flow.state.update
            flow.finish_update(batch)
            if rng.random() < 0.5:
                saved, saved_trained = _copy(flow.state.to_json()), dict(trained)
        assert flow.outstanding_rollouts <= config.max_outstanding_rollouts
        if flow.state.update == flow.updates:
            break
        del lease
    else:
        pytest.fail("the run did not end: some wait has no end")
    flow.close_books()
    scheduled = {schedule().group(index).group_id for index in range(flow.state.next_index)}
    assert set(flow.state.ended) == scheduled, "no group is lost"
    assert {g for g, (ending, _) in flow.state.ended.items() if ending == Ending.TRAINED} == set(trained)


def _copy(state: dict) -> dict:  # type: ignore[type-arg]
    import json

    return json.loads(json.dumps(state))


def test_a_ready_group_beyond_the_bound_is_scheduled_again() -> None:
    flow = new_flow(algorithm(max_staleness=1), FlowState(update=2, version_n=5))
    old, *_ = lease_all(flow)
    flow.admit(group(old, PolicyVersion(0, 3)), PolicyVersion(0, 3))
    flow.take_batch(0.0)
    assert flow.dropped_stale == 1 and not flow.ready
    again = flow.lease("node0", flow.version)
    assert again is not None and again.spec.group_id == old


def test_only_ancestors_of_the_present_weights_count() -> None:
    lineage = [[1, 0], [3, 4]]  # attempt 1 reached 7, attempt 2 came to nothing, attempt 3 went on from 4
    assert is_ancestor(PolicyVersion(1, 4), lineage) and is_ancestor(PolicyVersion(3, 9), lineage)
    assert not is_ancestor(PolicyVersion(1, 5), lineage)
    assert not is_ancestor(PolicyVersion(2, 4), lineage)


def test_groups_that_ended_outside_the_loop_are_not_handed_out() -> None:
    flow = new_flow(state=FlowState(ended={"g000000": ["trained", "update 0"]}))
    assert lease_all(flow)[0] == "g000001"


def failing(flow: GroupFlow, harness: str, times: int) -> list[bool]:
    return [flow.judge_harness(harness, True, "no answer") for _ in range(times)]


def test_a_harness_is_set_aside_after_so_many_failures_in_a_row() -> None:
    flow = new_flow(set_aside_after=3)
    assert failing(flow, "b", 2) == [False, False]
    assert not flow.judge_harness("b", False, "") and failing(flow, "b", 2) == [False, False], "counted anew"
    assert not flow.judge_harness("a", False, ""), "another harness's success is its own"
    assert failing(flow, "b", 2) == [True, False], "one alarm"
    assert flow.state.set_aside == {"b": "3 groups in a row failed, up to update 0: no answer"}
    assert True not in failing(new_flow(set_aside_after=0), "b", 50), "0 = never"


def test_groups_of_a_harness_that_is_set_aside_end_once_with_the_reason() -> None:
    flow = new_flow(algorithm(max_outstanding_rollouts=96))
    out = {flow.lease("node0", flow.version) for _ in range(6)}
    lost, kept = [lease for lease in out if lease is not None and lease.spec.harness == "b"][:2]
    failing(flow, "b", 2)
    assert flow.fail(lost.spec.group_id, "no answer") is False, "not rolled again"
    assert flow.state.ended[lost.spec.group_id] == [Ending.ABANDONED, "harness set aside: b; no answer"]
    flow.admit(group(kept.spec.group_id, flow.version), flow.version)  # what came in is trained
    flow.release_engine("node0")
    again = [flow.lease("node1", flow.version) for _ in range(9)]
    assert {lease.spec.harness for lease in again if lease} == {"a", "c"} and None not in again
    assert flow.passed_over and all(spec.harness == "b" for spec in flow.passed_over)
    for spec in flow.passed_over:
        assert flow.state.ended[spec.group_id] == [Ending.ABANDONED, "harness set aside: b"]
    assert kept.spec.group_id not in flow.state.ended
    flow.close_books()
    scheduled = {schedule().group(index).group_id for index in range(flow.state.next_index)}
    assert set(flow.state.ended) == scheduled and len(flow.passed_over) == len({s.group_id for s in flow.passed_over})


def test_set_aside_survives_a_resume_and_can_be_lifted() -> None:
    flow = new_flow()
    failing(flow, "b", 2)
    failing(flow, "c", 1)
    state = FlowState.from_json(_copy(flow.state.to_json()))
    flow = new_flow(state=state, attempt=2)
    assert {flow.schedule.group(i).harness for i in range(9)} == {"a", "b", "c"}, "the schedule stays what it was"
    leased = [lease for _ in range(6) if (lease := flow.lease("node0", flow.version))]
    assert {lease.spec.harness for lease in leased} == {"a", "c"}
    assert failing(flow, "c", 1) == [True], "what was counted before counts on"
    assert flow.readmit(["b", "a"]) == ["b"] and list(flow.state.set_aside) == ["c"]
    flow.release_engine("node0")
    leased = [lease for _ in range(6) if (lease := flow.lease("node0", flow.version))]
    assert {lease.spec.harness for lease in leased} == {"a", "b"}
    assert failing(flow, "b", 1) == [False]


def test_an_older_checkpoint_can_be_read() -> None:
    saved = _copy(FlowState(update=3).to_json())
    del saved["failing"], saved["set_aside"]
    assert FlowState.from_json(saved) == FlowState(update=3)


def test_nothing_is_handed_out_when_every_harness_is_set_aside() -> None:
    flow = new_flow(set_aside_after=1)
    for harness in "ab":
        failing(flow, harness, 1)
        assert not flow.stranded
    failing(flow, "c", 1)
    assert flow.stranded and flow.lease("node0", flow.version) is None and flow.state.next_index == 0

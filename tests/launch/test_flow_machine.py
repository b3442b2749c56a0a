"""A state machine of the queue and its ledger: leases, groups that come back well, badly, late or twice, lost engines,
updates, partial syncs, checkpoints, crashes and resumes in any order. Nothing is lost, torn, trained twice or too old.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipeline.cli import compose_config
from pipeline.config import Config
from pipeline.launch.coordinator import FLUSH_S, Coordinator
from pipeline.launch.draws import open_schedule
from pipeline.launch.run_directory import RunDirectory
from pipeline.records import Outcome, PolicyVersion, RolloutRecord, TaskRef, Verdict
from pipeline.report.store import read_jsonl
from pipeline.stages.difficulty import by_harness
from pipeline.stages.flow import Ending, FlowState, GroupFlow, ReadyGroup

SIZE, UPDATES, SILENCE_S, STALE_WAIT_S = 4, 5, 30.0, 20.0
ENGINES = ("node0", "node1")
TASKS = [TaskRef(f"t{number}", Path(f"t{number}")) for number in range(6)]
FATES: dict[str, tuple[float | None, ...]] = {  # correctness of a group's rollouts
    "contrast": (1.0, 0.0, 1.0, 0.0),
    "no contrast": (1.0, 1.0, 1.0, 1.0),
    "partly graded": (1.0, 0.0, None, None),
    "ungraded": (1.0, None, None, None),
}


@cache
def settings_of(curriculum: bool, staleness: int) -> Config:
    words = (
        f"mix.harnesses=[pi,codex] algorithm.group_size={SIZE} algorithm.groups_per_update=2 reward=plain "
        f"algorithm.max_outstanding_rollouts=24 algorithm.stale_wait_s={STALE_WAIT_S} algorithm.max_rerolls=1 "
        f"algorithm.max_staleness={staleness} curriculum.enabled={str(curriculum).lower()} mix.set_aside_after=0"
    )
    return compose_config(words.split())


class Queue(RuleBasedStateMachine):
    """What ranks may do to the coordinator. ``now``: its clock."""

    @initialize(curriculum=st.booleans(), staleness=st.integers(1, 3))
    def begin_run(self, curriculum: bool, staleness: int) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="yoke-machine-"))
        self.config, self.run = settings_of(curriculum, staleness), RunDirectory(self.place)
        self.now = 0.0
        self.saved = json.dumps(FlowState().to_json())
        self.specs: dict[str, tuple[str, str]] = {}  # group → (task, harness), which no crash may change
        self.start_attempt()

    def start_attempt(self) -> None:
        attempt = self.run.new_attempt()
        state = FlowState.from_json(json.loads(self.saved))
        schedule = open_schedule(TASKS, self.config, self.run, state.next_index)
        self.flow = GroupFlow(schedule, self.config.algorithm, UPDATES, state, attempt.number)
        self.coordinator = Coordinator(self.config, attempt, self.flow, lambda: self.now)
        self.coordinator.set_phase("train")
        self.out: list[tuple[str, dict[str, Any], PolicyVersion]] = []  # (engine, work, what it serves) not back yet
        self.batch: list[ReadyGroup] | None = None
        self.trained_now: set[str] = set()  # in this attempt
        for engine in ENGINES:
            self.sync(engine)

    # --- engine ranks

    @rule(engine=st.sampled_from(ENGINES))
    def sync(self, engine: str) -> None:
        """An engine registers if it is unknown, and gets the present weights; the other one may lag behind."""
        if engine not in self.coordinator.engines:
            self.coordinator.register(engine, "", "")
        self.coordinator.set_weights(self.coordinator.engines[engine], str(self.flow.version))

    @rule(engine=st.sampled_from(ENGINES))
    def fail_to_sync(self, engine: str) -> None:
        if engine in self.coordinator.engines:
            self.coordinator.drop_engine(self.coordinator.engines[engine])

    @rule(engines=st.lists(st.sampled_from(ENGINES), min_size=1, max_size=8))
    def lease(self, engines: list[str]) -> None:
        self.coordinator.draw_ahead()
        for engine in engines:
            work = self.coordinator.lease(engine, 0.0)["work"]
            if work is not None:
                self.begin(engine, work)

    def begin(self, engine: str, work: dict[str, Any]) -> None:
        known = self.specs.setdefault(work["group_id"], (work["task_id"], work["harness"]))
        assert known == (work["task_id"], work["harness"]), "a group stays what it is"
        assert work["size"] == len(work["indices"]) == SIZE
        self.out.append((engine, work, PolicyVersion.parse(self.coordinator.engines[engine].weights)))

    @rule(data=st.data(), fates=st.lists(st.sampled_from([*FATES, "contrast", "contrast"]), min_size=1, max_size=4))
    def close(self, data: st.DataObject, fates: list[str]) -> None:
        """Groups come back, perhaps long after they were given to another engine."""
        for fate in fates[: len(self.out)]:
            place = data.draw(st.integers(0, len(self.out) - 1), label="which")
            self.bring_back(self.out.pop(place), fate, data.draw(st.booleans(), label="twice"))

    def bring_back(self, out: tuple[str, dict[str, Any], PolicyVersion], fate: str, twice: bool = False) -> None:
        """An engine that gets no answer says it ``twice``. What is in flight goes on over syncs."""
        engine, work, floor = out
        rolled = enumerate(FATES[fate])
        records = tuple(record(work, index, correctness, floor, self.flow.version.n) for index, correctness in rolled)
        for _ in range(1 + twice):
            self.coordinator.take_back(engine, work, records)

    @rule(engine=st.sampled_from(ENGINES))
    def lose(self, engine: str) -> None:
        """It is silent for too long; what it had may still come back, too late."""
        self.now += SILENCE_S + 1
        for other in ENGINES:
            if other != engine:
                self.coordinator.heartbeat(other, {}, [work["group_id"] for name, work, _ in self.out if name == other])
        self.coordinator.lost_engines(SILENCE_S)
        assert engine not in self.coordinator.engines
        assert not any(name == engine for _, _, name in self.flow.out)

    @rule(seconds=st.sampled_from([1.0, STALE_WAIT_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    # --- the trainer

    @precondition(lambda self: self.batch is None and self.flow.state.update < UPDATES and len(self.flow.ready) > 1)
    @rule()
    def take(self) -> None:
        self.coordinator.draw_ahead()
        self.batch = self.coordinator.take_batch()
        for ready in self.batch or ():
            oldest = min(record.version.n for record in ready.group.rollouts)
            assert 0 <= self.flow.version.n - oldest <= self.config.algorithm.max_staleness, "too old"
            assert len(ready.group.rollouts) in (SIZE, SIZE // 2) and sum(ready.group.advantages) == 0.0, "torn"
            assert ready.group.group_id not in self.trained_now | set(self.flow.state.ended), "trained twice"

    @precondition(lambda self: self.batch is not None)
    @rule(pushed=st.sets(st.sampled_from(ENGINES)))
    def update(self, pushed: set[str]) -> None:
        """And a new version, which only some of the engines get now."""
        assert self.batch is not None
        before = self.flow.version
        self.trained_now |= {ready.group.group_id for ready in self.batch}
        self.coordinator.finish_update(self.batch)
        self.batch = None
        assert (self.flow.version.n, self.flow.version.attempt) == (before.n + 1, before.attempt)
        for engine in pushed & set(self.coordinator.engines):
            self.sync(engine)

    @rule()
    def save(self) -> None:
        self.saved = json.dumps(self.coordinator.flow_state())

    @precondition(lambda self: self.flow.state.update > json.loads(self.saved)["update"])
    @rule()
    def crash_and_resume(self) -> None:
        """Whatever was not saved is forgotten, a batch that was taken too."""
        self.coordinator.stop()
        self.start_attempt()

    # --- promises

    @invariant()
    def every_group_is_in_one_place(self) -> None:
        flow = self.flow
        places = [
            *flow.state.ended, *flow.leases, *(ready.group.group_id for ready in flow.ready),
            *(spec.group_id for spec in flow.pending), *(ready.group.group_id for ready in self.batch or ()),
        ]  # fmt: skip
        handed_out = {f"g{index:06d}" for index in range(flow.state.next_index)}
        assert Counter(places) == Counter(handed_out)

    @invariant()
    def credits_are_kept(self) -> None:
        assert self.flow.outstanding_rollouts <= self.config.algorithm.max_outstanding_rollouts

    @invariant()
    def each_ended_group_counts_once(self) -> None:
        endings = Counter(ending for ending, _ in self.flow.state.ended.values())
        figures = by_harness(self.flow.state.difficulty).values()
        assert sum(own.groups for own in figures) == endings[Ending.TRAINED] + endings[Ending.SKIPPED]
        assert sum(own.no_contrast for own in figures) == endings[Ending.SKIPPED]
        assert sum(own.abandoned for own in figures) == endings[Ending.ABANDONED]

    def teardown(self) -> None:
        """From wherever it stands the run can be brought to its end, within a bounded number of steps."""
        if not hasattr(self, "flow"):
            return
        try:
            self.finish()
        finally:
            self.coordinator.stop()
            shutil.rmtree(self.place, ignore_errors=True)

    def finish(self) -> None:
        for _ in range(200):
            if self.flow.state.update == UPDATES:
                break
            if self.batch is not None:
                self.update(set(ENGINES))
            for engine in ENGINES:
                self.sync(engine)
            self.lease(list(ENGINES))
            while self.out:
                self.bring_back(self.out.pop(), "contrast")
            for promise in (self.every_group_is_in_one_place, self.credits_are_kept, self.each_ended_group_counts_once):
                promise()
            self.now += STALE_WAIT_S  # for groups of leases whose results came under another lease
            self.take()
        assert self.flow.state.update == UPDATES, "a deadlock"
        self.flow.close_books()
        assert set(self.flow.state.ended) == {f"g{index:06d}" for index in range(self.flow.state.next_index)}
        self.check_ledgers()

    def check_ledgers(self) -> None:
        """In no attempt is a group trained twice, and the state tells of each trained group what a ledger tells."""
        assert self.coordinator.lines.flush(12 * FLUSH_S)
        told: dict[str, str] = {}
        for number in self.run.attempt_numbers():
            entries = [e for e in read_jsonl(self.run.attempt(number).ledger) if e["what"] == "trained"]
            assert max(Counter(entry["group"] for entry in entries).values(), default=0) <= 1
            told |= {entry["group"]: entry["reason"] for entry in entries}
        trained = {g: reason for g, (ending, reason) in self.flow.state.ended.items() if ending == Ending.TRAINED}
        assert trained.items() <= told.items()


def record(
    work: dict[str, Any], index: int, correctness: float | None, floor: PolicyVersion, newest: int
) -> RolloutRecord:
    """The oldest token is of ``floor``, the newest of version ``newest``: the rollout went on over syncs."""
    outcome = Outcome.INFRASTRUCTURE if correctness is None else Outcome.SOLVED
    verdict = Verdict(None, correctness, 1, "spoilt" if correctness is None else "")
    return RolloutRecord(
        f"r{index}", work["group_id"], index, work["task_id"], work["harness"], outcome, verdict, (), floor,
        PolicyVersion(floor.attempt, newest), 1, 0, 0, 1, 1, 1.0,
    )  # fmt: skip


@pytest.mark.slow
class TestQueue(Queue.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

"""A run of many nodes on a virtual clock: the real schedule, flow control, coordinator, advantage and ledger, with
scripted engines and a scripted trainer.

Engines die, fail to take weights and lose calls; the whole job is interrupted. What was promised is checked from what
the scripted engines saw, not from what the flow says of itself. What it leaves out: sockets, group files, and that an
engine is slower the more rollouts it serves.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.config import AlgorithmConfig, Config, UserError
from pipeline.launch.coordinator import LONG_POLL_S, Coordinator, Engine, spec_from_json
from pipeline.launch.draws import open_schedule
from pipeline.launch.run_directory import RunDirectory
from pipeline.records import GroupSpec, Outcome, PolicyVersion, RolloutRecord, TaskRef, Verdict
from pipeline.stages.difficulty import by_task
from pipeline.stages.flow import Ending, FlowState, GroupFlow, ReadyGroup, is_ancestor, is_usable

HEARTBEAT_S = 1.0
HEARTBEATS = 5  # simulated as one
SILENCE_S = 30.0
LOOK_S = 0.5  # the trainer looks this often when nothing changes
HOUR_S = 3600.0
LONGEST_S = 7 * 24 * HOUR_S  # of simulated time: a run that has not ended by then never will
STALL_S = 1800.0  # a trainer that has waited so long for a batch gives up
AGAIN_S = 1.0  # after a call that got no answer
SERVED = "served"  # in a rollout's info: every policy version that its engine served meanwhile
TASKS = 512


class Clock:
    """Seconds since the start, and what is to happen when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._coming: list[tuple[float, int, Callable[[], object]]] = []
        self._count = itertools.count()

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._coming, (self.now + seconds, next(self._count), action))

    def step(self) -> None:
        """Go to the next moment at which something happens, and let it happen."""
        self.now, _, action = heapq.heappop(self._coming)
        action()


@dataclass
class Tally:
    """What a simulation counts. Slot seconds: one slot of an engine for one second."""

    slots: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # state of a slot → slot seconds
    calls: Counter[str] = field(default_factory=Counter)  # method of the coordinator → calls
    trainer: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # what it did → seconds
    staleness: list[int] = field(default_factory=list)  # of every trained group, by the flow
    ages: list[int] = field(default_factory=list)  # of what each trained rollout was sampled with, by its engine
    spanning: int = 0  # trained rollouts that were in flight during a sync
    most_outstanding: int = 0  # rollouts that were out or waiting for their update at once
    most_queued: int = 0  # rollouts that waited for a slot of one engine at once
    failed_syncs: int = 0
    lost_calls: int = 0
    broken: list[str] = field(default_factory=list)  # promises, when it was seen
    trained: dict[str, int] = field(default_factory=dict)  # group → update, as the newest checkpoint's run had it
    interruptions: list[tuple[int, int]] = field(default_factory=list)  # (rollouts in flight, rollouts lost)
    engine_losses: list[tuple[int, int]] = field(default_factory=list)
    running: int = 0  # rollouts begun, less those that came to an end or were lost
    kept: int = 0  # rollouts of an earlier attempt that were used
    dropped: int = 0  # groups that became too old
    groups_closed: int = 0
    cpu_s: float = 0.0  # of this machine, inside the coordinator's methods


@dataclass(frozen=True)
class Simulated:
    """The end of a simulation."""

    nodes: int
    config: Config
    seconds: float
    state: FlowState
    scheduled: list[str]
    tally: Tally

    @property
    def groups_per_hour(self) -> float:
        return len(self.tally.trained) / self.seconds * HOUR_S

    def slot_share(self, *states: str) -> float:
        """The share of all slot seconds that were spent in ``states``."""
        return sum(self.tally.slots[state] for state in states) / max(1e-9, sum(self.tally.slots.values()))

    def trainer_share(self, *states: str) -> float:
        return sum(self.tally.trainer[state] for state in states) / max(1e-9, sum(self.tally.trainer.values()))

    def complaints(self) -> list[str]:
        """Broken promises: each group ends exactly once, within the bound of staleness; empty when all were kept."""
        ended, counted = self.state.ended, self.tally.trained
        trained = {group for group, (ending, _) in ended.items() if ending == Ending.TRAINED}
        updates, oldest = first_updates(self.config), max([*self.tally.staleness, *self.tally.ages], default=0)
        skipped = sum(ending == Ending.SKIPPED for ending, _ in ended.values())
        seen = list(by_task(self.state.difficulty).values())
        figures = (sum(own.groups for own in seen), sum(own.no_contrast for own in seen))
        algorithm, most = self.config.algorithm, self.tally.most_outstanding
        queue = self.config.concurrency - 1 + algorithm.group_size
        lost = [pair for pair in (*self.tally.interruptions, *self.tally.engine_losses) if pair[1] > pair[0]]
        found = (
            (set(self.scheduled) != set(ended), f"{len(set(self.scheduled) ^ set(ended))} groups lost or made up"),
            (trained != set(counted), f"{len(trained ^ set(counted))} groups trained and not counted, or not trained"),
            (self.state.update != updates, f"{self.state.update} updates instead of {updates}"),
            (oldest > algorithm.max_staleness, f"a group was trained {oldest} updates late"),
            (min(self.tally.ages, default=0) < 0, "a rollout was trained before the update that sampled it"),
            (most > algorithm.max_outstanding_rollouts, f"{most} rollouts were out or waiting at once"),
            (self.tally.most_queued > queue, f"{self.tally.most_queued} rollouts waited for a slot of one engine"),
            (figures != (len(trained) + skipped, skipped), f"(groups, without contrast) in the figures: {figures}"),
            (bool(lost), f"(in flight, lost): {lost}"),
        )
        return [*dict.fromkeys(self.tally.broken), *(text for broken, text in found if broken)]


def simulate(config: Config, nodes: int, place: Path) -> Simulated:
    """The run of ``config`` on ``nodes`` nodes. ``place``: an empty directory, for the ledger."""
    sized = for_size(config, nodes)
    run = _Run(sized, nodes, place)
    run.clock.after(0.0, run.start_attempt)
    while not run.over:
        run.clock.step()
        if run.clock.now > LONGEST_S:
            raise TimeoutError(f"the simulated run did not end: {run.coordinator.status()['now']}")
    run.coordinator.stop()
    run.flow.close_books()
    run.tally.dropped += run.flow.dropped_stale
    scheduled = [run.flow.schedule.group(index).group_id for index in range(run.flow.state.next_index)]
    return Simulated(nodes, sized, run.clock.now, run.flow.state, scheduled, run.tally)


def for_size(config: Config, nodes: int) -> Config:
    """The settings with which ``nodes`` nodes run."""
    algorithm, factor = config.algorithm, nodes if config.simulate.per_node else 1
    grown: AlgorithmConfig = replace(
        algorithm,
        groups_per_update=algorithm.groups_per_update * factor,
        max_outstanding_rollouts=algorithm.max_outstanding_rollouts * factor,
    )
    return replace(config, algorithm=grown)


def first_updates(config: Config) -> int:
    """How many updates of the run are simulated."""
    return min(config.simulate.updates, config.training.updates)


@dataclass
class _Rollout:
    work: dict[str, Any]
    spec: GroupSpec
    index: int
    records: list[RolloutRecord]  # of its group so far
    served: list[str] = field(default_factory=list)  # policy versions, while it ran


class _Run:
    """One run from its first attempt to its last update."""

    def __init__(self, config: Config, nodes: int, place: Path) -> None:
        self.config, self.nodes, self.times = config, nodes, config.simulate
        self.run_directory = RunDirectory(place)
        self.updates = first_updates(config)
        self.clock, self.tally = Clock(), Tally()
        self.random = random.Random(f"{config.seed}/{nodes}")
        self.saved = (json.dumps(FlowState().to_json()), dict[str, int]())  # newest checkpoint, and what it has trained
        self.closed: dict[str, set[frozenset[str]]] = {}  # group → the graded rollouts of each time it came back
        self.finished: dict[tuple[str, int], RolloutRecord] = {}  # rollouts on disk; of each the newest
        self.tasks = [TaskRef(f"t{number}", Path(f"t{number}")) for number in range(TASKS)]
        self.over = False
        self.attempt = 0
        self.engines: list[_Engine] = []
        self._plan(self.times.interruption_h, self.interrupt)

    # --- attempts

    def start_attempt(self) -> None:
        attempt = self.run_directory.new_attempt()
        self.attempt = attempt.number
        state, trained = self.saved
        self.tally.trained = dict(trained)
        flow_state = FlowState.from_json(json.loads(state))
        config = self.config
        schedule = open_schedule(self.tasks, config, self.run_directory, flow_state.next_index)
        self.flow = GroupFlow(
            schedule, config.algorithm, config.training.updates, flow_state, attempt.number, config.mix.set_aside_after
        )
        self.coordinator = Coordinator(config, attempt, self.flow, self.clock)
        self.coordinator.set_phase("train")
        self.engines = [_Engine(self, f"node{number}") for number in range(self.nodes)]
        self.trainer = _Trainer(self)
        for engine in self.engines:
            self.after(self.times.start_s * self.random.uniform(0.8, 1.2), engine.come_up)
        self.after(HEARTBEATS * HEARTBEAT_S, self.beat)
        self.trainer.look()

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """As the clock's, for what dies with the attempt."""
        attempt = self.attempt
        self.clock.after(seconds, lambda: action() if attempt == self.attempt and not self.over else None)

    def beat(self) -> None:
        """All heartbeats of some seconds at once."""
        alive = [engine for engine in self.engines if engine.alive]
        with self.timed():
            for engine in alive:
                self.coordinator.heartbeat(engine.name, {"in_flight": len(engine.running)}, sorted(engine.held))
        self.tally.calls["heartbeat"] += HEARTBEATS * len(alive)
        self.after(HEARTBEATS * HEARTBEAT_S, self.beat)

    def call(self, method: str, **arguments: Any) -> Any:
        """One call of the real coordinator, counted and timed."""
        self.tally.calls[method] += 1
        with self.timed():
            answer = getattr(self.coordinator, method)(**arguments)
        self.tally.most_outstanding = max(self.tally.most_outstanding, self.flow.outstanding_rollouts)
        return answer

    def loses_call(self) -> bool:
        """Whether this call, or the answer to it, gets lost."""
        lost = self.random.random() < self.times.lost_calls
        self.tally.lost_calls += lost
        return lost

    @contextmanager
    def timed(self) -> Iterator[None]:
        begun = time.thread_time()
        yield
        self.tally.cpu_s += time.thread_time() - begun

    def changed(self) -> None:
        """What waits in a long poll asks again, oldest first, until there is nothing more to be had."""
        hungry = [engine for engine in self.engines if engine.state == "hungry"]
        for engine in sorted(hungry, key=lambda engine: engine.since):
            if not engine.ask():
                return

    # --- what goes wrong

    def _plan(self, hours: float, action: Callable[[], None]) -> None:
        """``action`` comes again and again, ``hours`` apart in the mean."""
        if hours:

            def happen() -> None:
                if not self.over:
                    action()
                    self._plan(hours, action)

            self.clock.after(self.random.expovariate(1.0 / (hours * HOUR_S)), happen)

    def interrupt(self) -> None:
        """The job ends and is queued again; with a warning it writes a checkpoint first."""
        if not self.engines:
            return  # it has not started again yet
        if self.random.random() < self.times.warned:
            self.trainer.save()
        self.coordinator.stop()
        in_flight = sum(len(engine.running) for engine in self.engines)
        for engine in self.engines:
            engine.go_down()
        self.tally.interruptions.append((in_flight, self.tally.running))
        self.tally.running = 0
        self.tally.dropped += self.flow.dropped_stale
        self.engines = []
        self.attempt = -1  # nothing that was to come happens
        self.clock.after(self.times.requeue_s, lambda: None if self.over else self.start_attempt())


class _Engine:
    """A node's engine rank: as many rollouts at once as it has slots, and about as many waiting for one."""

    def __init__(self, run: _Run, name: str) -> None:
        self.run, self.name = run, name
        self.alive = False
        self.life = 0
        self.running: list[_Rollout] = []
        self.queue: deque[_Rollout] = deque()
        self.held: set[str] = set()
        self.serves = ""  # the policy version that its vLLM really has
        self.state, self.since = "starting", run.clock.now
        self._plan_loss()

    def come_up(self) -> None:
        self.alive = True
        self.run.call("register", engine=self.name, url="", control_url="")
        self._enter("syncing")

    def take_weights(self, version: str) -> bool:
        """The trainer pushes weights, under which what is in flight goes on. Whether that worked."""
        if not self.alive:
            return False
        if self.run.random.random() < self.run.times.sync_failures:
            self.run.tally.failed_syncs += 1
            self._restart()
            return False
        self.serves = version
        for rollout in self.running:
            rollout.served.append(version)
        return True

    def synced(self) -> None:
        """The coordinator knows of the weights: from the first time on there is work."""
        if self.state == "syncing" and self.serves:
            self._fill()
            self.want()

    def _restart(self) -> None:
        """Its weights are in doubt, so its vLLM starts again; the rank keeps its groups."""
        self._enter("down")
        self.serves = ""
        self.run.call("unregister", engine=self.name)
        self._later(self.run.times.start_s, self.come_up)

    def go_down(self) -> None:
        self._enter("down")
        self.serves = ""
        self.alive, self.life = False, self.life + 1
        self.running.clear()
        self.queue.clear()
        self.held.clear()

    def _plan_loss(self) -> None:
        hours = self.run.times.engine_loss_h
        if hours:
            self.run.after(self.run.random.expovariate(1.0 / (hours * HOUR_S)), self._lose)

    def _lose(self) -> None:
        """Whatever ran here is gone; nobody is told. Later the node comes back, empty."""
        if self.alive:
            in_flight, elsewhere = len(self.running), sum(len(engine.running) for engine in self.run.engines)
            self.go_down()
            lost = self.run.tally.running - (elsewhere - in_flight)
            self.run.tally.engine_losses.append((in_flight, lost))
            self.run.tally.running -= lost
            self.run.after(self.run.times.engine_back_s, self.come_up)
        self._plan_loss()

    def _enter(self, state: str) -> None:
        """Account for the slots up to now, then change the state of the idle ones."""
        now, slots = self.run.clock.now, self.run.config.concurrency
        busy = len(self.running)
        self.run.tally.slots["busy"] += busy * (now - self.since)
        self.run.tally.slots[self.state] += (slots - busy) * (now - self.since)
        self.state, self.since = state, now

    # --- groups

    def want(self) -> None:
        """Ask for a group unless enough is here; the answer takes a while."""
        if len(self.queue) >= self.run.config.concurrency:
            return self._enter("supplied")
        self._enter("asking")
        self._later(self.run.times.call_s, self.ask)

    def _later(self, seconds: float, action: Callable[[], object]) -> None:
        """As the run's `after`, for what dies with this life of the engine rank."""
        life = self.life
        self.run.after(seconds, lambda: action() if life == self.life else None)

    def ask(self) -> bool:
        """Whether there was a group for this engine."""
        if not self.serves:
            return False  # it asks again when it has weights
        waited = self.run.clock.now - self.since if self.state == "hungry" else 0.0
        self.run.tally.calls["lease"] += int(waited // LONG_POLL_S)  # polls that ended empty
        answer = self.run.call("lease", engine=self.name, wait_s=0.0)
        if answer["work"] is None:
            if self.state != "hungry":
                self._enter("hungry")
            return False
        if self.run.loses_call():  # the coordinator believes that the group is here
            self._enter("asking")
            self._later(AGAIN_S, self.want)
            return True
        self._begin(answer["work"])
        self.want()
        return True

    def _begin(self, work: dict[str, Any]) -> None:
        records: list[RolloutRecord] = []
        spec = spec_from_json(work)
        self.held.add(spec.group_id)
        self.queue.extend(_Rollout(work, spec, index, records) for index in work["indices"])
        self._fill()
        self.run.tally.most_queued = max(self.run.tally.most_queued, len(self.queue))

    def _fill(self) -> None:
        self._enter(self.state)
        while self.serves and self.queue and len(self.running) < self.run.config.concurrency:
            rollout = self.queue.popleft()
            kept = self.run.finished.get((rollout.spec.group_id, rollout.index))
            if kept is not None and is_usable(kept, rollout.work["keep_from"], rollout.work["lineage"]):
                self.run.tally.kept += 1
                self._add(rollout, kept)
                continue
            self.running.append(rollout)
            self.run.tally.running += 1
            rollout.served.append(self.serves)
            self._start(rollout)

    def _start(self, rollout: _Rollout) -> None:
        seconds = script_seconds(self.run.random, self.run.config, rollout.spec.harness)
        self._later(seconds, lambda: self._end(rollout, seconds))

    def _end(self, rollout: _Rollout, seconds: float) -> None:
        self._enter(self.state)
        self.running.remove(rollout)
        self.run.tally.running -= 1
        outage = not self.serves  # its vLLM is down at the end: no answer
        record = script_record(self.run.config, rollout.spec, rollout.index, rollout.served, seconds, outage)
        self._add(rollout, record)
        self._fill()
        if self.state == "supplied":
            self.want()

    def _add(self, rollout: _Rollout, record: RolloutRecord) -> None:
        rollout.records.append(record)
        if record.verdict.correctness is not None:
            self.run.finished[(rollout.spec.group_id, rollout.index)] = record
        if len(rollout.records) == rollout.spec.size:
            self._later(self.run.times.call_s, lambda: self._close(rollout))

    def _close(self, rollout: _Rollout) -> None:
        records = tuple(sorted(rollout.records, key=lambda record: record.index))
        lost = self.run.loses_call()
        if not lost or self.run.random.random() < 0.5:  # the answer gets lost on the way back
            self._take_back(rollout, records)
        if lost:
            return self._later(AGAIN_S, lambda: self._close(rollout))
        self.held.discard(rollout.spec.group_id)
        self.run.changed()
        self.run.trainer.look()

    def _take_back(self, rollout: _Rollout, records: tuple[RolloutRecord, ...]) -> None:
        if len(records) != rollout.spec.size:
            self.run.tally.broken.append(f"a group of {rollout.spec.size} came back with {len(records)} rollouts")
        self.run.tally.calls["close"] += 1
        self.run.tally.groups_closed += 1
        graded = frozenset(sign(record) for record in records if record.verdict.correctness is not None)
        self.run.closed.setdefault(rollout.spec.group_id, set()).add(graded)
        with self.run.timed():
            self.run.coordinator.take_back(self.name, rollout.work, records)


class _Trainer:
    """The trainer rank's loop: sync, wait for a batch, update, checkpoint."""

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.waiting = True
        self.doing, self.since = "start", run.clock.now
        self.last_batch = run.clock.now
        self._looking = False

    def _enter(self, doing: str) -> None:
        self.run.tally.trainer[self.doing] += self.run.clock.now - self.since
        self.doing, self.since = doing, self.run.clock.now

    def look(self) -> None:
        """As in the real loop, at every change and twice a second."""
        if not self.waiting or self.run.over:
            return
        with self.run.timed():
            self.run.coordinator.draw_ahead()
            lost = self.run.coordinator.lost_engines(SILENCE_S)
            batch = self.run.coordinator.take_batch()
            unsynced = self.run.coordinator.unsynced(str(self.run.flow.version))
        if batch is not None:
            return self._update(batch)
        if unsynced:
            return self._sync(unsynced)
        if self.run.clock.now - self.last_batch > STALL_S:
            raise UserError(
                f"no batch within {STALL_S:g} s: {self.run.coordinator.status()['now']}; so would a real run end"
            )
        if lost:
            self.run.changed()
        if not self._looking:
            self._looking = True
            self.run.after(LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._looking = False
        self.look()

    def _update(self, batch: list[ReadyGroup]) -> None:
        self.waiting = False
        self._enter("update")
        for ready in batch:
            assert ready.group.group_id not in self.run.tally.trained, "a group is trained twice"
            self.run.tally.trained[ready.group.group_id] = self.run.flow.state.update
            self._inspect(ready)
        self.run.tally.staleness += self.run.flow.staleness(batch)
        self.run.after(self.run.times.update_s, lambda: self._updated(batch))

    def _inspect(self, ready: ReadyGroup) -> None:
        """What the engines know of a group that is trained: it is whole, and of the present weights' ancestors."""
        tally, flow, records = self.run.tally, self.run.flow, ready.group.rollouts
        if frozenset(map(sign, records)) not in self.run.closed[ready.group.group_id]:
            tally.broken.append("a torn group was trained")
        for record in records:
            versions = [PolicyVersion.parse(version) for version in record.info[SERVED]]
            tally.ages += [flow.version.n - version.n for version in versions]
            tally.spanning += len(set(versions)) > 1
            if not all(is_ancestor(version, flow.state.lineage) for version in versions):
                tally.broken.append("a rollout of weights that did not lead to the present ones was trained")

    def _updated(self, batch: list[ReadyGroup]) -> None:
        with self.run.timed():
            self.run.coordinator.finish_update(batch)
        config, done = self.run.config.training, self.run.flow.state.update
        if done == self.run.updates:
            return self._end()
        if done % config.checkpoint_every == 0:
            self._enter("checkpoint")
            self.save()
            return self.run.after(self.run.times.checkpoint_s, self._sync)
        self._sync()

    def save(self) -> None:
        """What a checkpoint holds. Groups of an update that is being made are not trained yet."""
        with self.run.timed():
            state = self.run.coordinator.flow_state()
        ended = {g: u for g, u in self.run.tally.trained.items() if g in state["ended"]}
        self.run.saved = (json.dumps(state), ended)

    def _sync(self, unsynced: list[Engine] | None = None) -> None:
        """As the real loop: into every engine that lacks the weights now; each may fail by itself."""
        self.waiting = False
        self._enter("sync")
        targets = self.run.coordinator.unsynced(str(self.run.flow.version)) if unsynced is None else unsynced
        self.run.after(self.run.times.sync_s, lambda: self._synced(targets))

    def _synced(self, targets: list[Engine]) -> None:
        version = str(self.run.flow.version)
        scripted = {engine.name: engine for engine in self.run.engines}
        for target in targets:
            if scripted[target.name].take_weights(version):
                self.run.coordinator.set_weights(target, version)
            else:
                self.run.coordinator.drop_engine(target)
            scripted[target.name].synced()
        self._enter("wait")
        self.waiting, self.last_batch = True, self.run.clock.now
        self.run.changed()
        self.look()

    def _end(self) -> None:
        self._enter("end")
        for engine in self.run.engines:
            engine.go_down()
        self.run.over = True


# --- scripted rollouts: the same group in the same run always comes out the same


def script_seconds(rng: random.Random, config: Config, harness: str) -> float:
    """How long a rollout takes: log-normal, cut at the harness's time limit."""
    times = config.simulate
    median = times.rollout_s * times.slower.get(harness, 1.0)
    return min(median * math.exp(rng.gauss(0.0, times.spread)), max(config.harness.timeout_s, 8 * times.rollout_s))


def script_record(
    config: Config, spec: GroupSpec, index: int, served: list[str], seconds: float, outage: bool = False
) -> RolloutRecord:
    """What a rollout comes to: some are spoilt, and in some groups all score the same."""
    versions = sorted({PolicyVersion.parse(version) for version in served})
    own = random.Random(f"{config.seed}/{spec.group_id}/{index}/{versions[0]}")
    alike = random.Random(f"{config.seed}/{spec.group_id}").random() < config.simulate.no_contrast
    spoilt = outage or own.random() < config.simulate.ungraded
    correctness = None if spoilt else 1.0 if alike else float(index % 2)
    outcome = Outcome.INFRASTRUCTURE if spoilt else Outcome.SOLVED if correctness else Outcome.UNSOLVED
    verdict = Verdict(None, correctness, 5, "scripted: spoilt" if spoilt else "")
    return RolloutRecord(
        f"{spec.group_id}-{index}", spec.group_id, index, spec.task.task_id, spec.harness, outcome, verdict, (),
        versions[0], versions[-1], 10, 0, 0, 20_000, 2_000, seconds, {SERVED: served},
    )  # fmt: skip


def sign(record: RolloutRecord) -> str:
    """Which rollout it is, and under which weights it ran."""
    return f"{record.rollout_id}/{','.join(record.info[SERVED])}/{record.wall_s}"

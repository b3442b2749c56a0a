"""The coordinator, on node 0: hands groups to engine ranks, takes them back closed, and feeds the trainer.

One lock, no polling.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.launch import draws
from pipeline.launch.overview import EndedGroups, counts_overview, node_overview, rollouts_overview
from pipeline.launch.run_directory import Attempt
from pipeline.launch.storage import Lines, Storage
from pipeline.records import GroupSpec, Outcome, PolicyVersion, RolloutRecord, TaskRef, TrainGroup
from pipeline.stages.advantage import (
    configured_reward,
    enough_graded,
    reward_failures,
    score,
    to_train_group,
    why_ungraded,
)
from pipeline.stages.curriculum import Curriculum
from pipeline.stages.evaluation import Cells
from pipeline.stages.flow import GroupFlow, ReadyGroup, oldest_version
from pipeline.stages.outcome import harness_failed

LONG_POLL_S = 5.0
AUDIT_S = 10.0  # leases are compared this often with what the engine ranks say they have
ERRORS_KEPT = 5
REWARD_FAILURES = 3  # groups in a row without a single reward because its function fails, then the run ends
FLUSH_S = 5.0  # that the end of a run, or a checkpoint, waits for the ledger


@dataclass
class Engine:
    """An engine rank as it last reported itself."""

    name: str
    url: str
    control_url: str
    weights: str = ""  # the policy version that was pushed into it; empty after its vLLM was restarted


@dataclass
class Progress:
    """Figures of the closed groups since the last update, for metrics and the live view."""

    records: list[RolloutRecord] = field(default_factory=list)
    rollouts: int = 0
    no_contrast: int = 0  # groups


class Coordinator:
    """Everything that ranks ask for by RPC.

    Methods named in `methods` run on server threads; the rest on the trainer's.
    """

    def __init__(
        self,
        config: Config,
        attempt: Attempt,
        flow: GroupFlow | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` in seconds, of any origin; simulations give their own."""
        self.config, self.attempt, self.flow, self._clock = config, attempt, flow, clock
        self.engines: dict[str, Engine] = {}  # those whose vLLM is up
        self.seen: dict[str, float] = {}  # engine rank → when it last called
        self.stats: dict[str, dict[str, Any]] = {}
        self.failure: str | None = None  # why the run cannot go on
        self.mistake = False  # it is the user's to mend
        self.interrupted = False  # someone asked for a checkpoint and the end
        self.end_asked: Callable[[], bool] = lambda: self.interrupted  # by whatever way
        self.checkpoint_wanted = False  # something happened that a crash must not undo
        self.progress = Progress()
        self.events: deque[dict[str, Any]] = deque(maxlen=500)
        self.errors: deque[dict[str, Any]] = deque(maxlen=ERRORS_KEPT)
        self.phase = "starting"
        self.started = time.time()
        self._cells: Cells | None = None
        self._stopping = False
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # what the trainer waits for
        self._supply = threading.Condition(lock)  # what leases wait for: 128 of them wake for nothing in 5 ms
        self._reward = configured_reward(config)
        self._reward_failures = 0  # groups in a row
        self._reward_alarmed = False
        self._event_count = 0
        self._ended_groups = EndedGroups()
        self._held: dict[str, frozenset[str]] = {}  # engine rank → groups that it says it works on
        self._unheld: frozenset[tuple[str, int]] = frozenset()  # leases that nobody held at the last audit
        self._audit_due = self._clock() + AUDIT_S
        self._closed: set[int] = set()  # lease ids
        self.storage = Storage(attempt, config.cluster.storage_wait_s, lambda kind, text: self.emit(kind, text=text))
        self.lines = Lines(self.storage)

    @property
    def methods(self) -> dict[str, Any]:
        return {
            "register": self.register,
            "unregister": self.unregister,
            "lease": self.lease,
            "close": self.close,
            "hand_back": self.hand_back,
            "retire": self.retire,
            "heartbeat": self.heartbeat,
            "fail": self.fail,
            "tell": self.tell,
            "interrupt": self.interrupt,
            "ending": self.ending,
            "status": self.status,
            "overview": self.overview,
        }

    # --- RPC, called by engine ranks and by the launcher

    def register(self, engine: str, url: str, control_url: str) -> dict[str, Any]:
        """An engine rank's vLLM is up, for the first time or again. It gets weights before it gets groups."""
        with self._changed:
            self.seen[engine] = self._clock()
            self.engines[engine] = Engine(engine, url, control_url)
            self._changed.notify_all()
        return {}

    def unregister(self, engine: str) -> dict[str, Any]:
        """An engine rank's vLLM is down: it keeps its groups and gets nothing new until it registers."""
        with self._changed:
            self.engines.pop(engine, None)
        return {}

    def heartbeat(self, engine: str, stats: dict[str, Any], held: list[str]) -> dict[str, Any]:
        """``held``: the groups that it works on. Answers whether to stop, and whether this engine rank is known: one
        that was given up registers again.
        """
        with self._changed:
            self.seen[engine] = self._clock()
            self.stats[engine] = stats
            self._held[engine] = frozenset(held)
            return {"stop": self._stopping, "known": engine in self.engines}

    def tell(self, engine: str, kind: str, text: str) -> dict[str, Any]:
        """An alarm (``error``) or a ``message`` of an engine rank, for the live view."""
        self.emit(kind, text=f"{engine}: {text}")
        return {}

    def fail(self, engine: str, reason: str, mistake: bool = False) -> dict[str, Any]:
        """An engine rank cannot go on; the trainer ends the attempt at once, with this reason."""
        with self._changed:
            self.failure, self.mistake = f"engine rank {engine}: {reason}", mistake
            self._changed.notify_all()
        return {}

    def ending(self, engine: str) -> dict[str, Any]:
        """Whether the job was told to end, by a signal or by `yoke stop`."""
        return {"ending": self.end_asked() or self._stopping}

    def interrupt(self) -> dict[str, Any]:
        """The person at the terminal wants the run to stop: the trainer checkpoints first."""
        with self._changed:
            self.interrupted = True
            self._changed.notify_all()
        return {}

    def lease(self, engine: str, wait_s: float = LONG_POLL_S) -> dict[str, Any]:
        """Work for ``engine``: waits up to ``wait_s`` for some, then answers {"work": None}."""
        deadline = self._clock() + wait_s
        with self._changed:
            while True:
                if self._stopping:
                    return {"work": None, "stop": True}
                work = self._work_for(engine)
                left = deadline - self._clock()
                if work is not None or left <= 0:
                    return {"work": work, "stop": False}
                self._supply.wait(left)

    def _work_for(self, engine: str) -> dict[str, Any] | None:
        known = self.engines.get(engine)
        if known is None or not known.weights:
            return None
        if self._cells is not None:
            return self._cells.lease(engine)
        if self.flow is None or self.phase != "train":
            return None
        lease = self.flow.lease(engine, PolicyVersion.parse(known.weights))
        while self.flow.passed_over:
            spec = self.flow.passed_over.pop(0)
            self._note(spec.group_id, "abandoned", self.flow.state.ended[spec.group_id][1])
        if lease is None:
            return None
        oldest = self.flow.version.n - self.config.algorithm.max_staleness
        return _train_work(lease.spec, lease.lease_id) | {"keep_from": oldest, "lineage": self.flow.state.lineage}

    def close(self, engine: str, work: dict[str, Any], path: str) -> dict[str, Any]:
        """A group is done: its rollouts lie in the Parquet file ``path``. An engine that got no answer asks again."""
        with self._changed:
            if work["kind"] == "train" and work["lease_id"] in self._closed:
                return {}  # its file may be gone by now
        return self.take_back(engine, work, self.storage.read_rollouts(Path(path)))

    def take_back(self, engine: str, work: dict[str, Any], records: tuple[RolloutRecord, ...]) -> dict[str, Any]:
        """The rollouts of ``work``, which ``engine`` had, have ended."""
        if work["kind"] == "train":
            records = score(records, self._reward)  # the user's function may be slow: not under the lock
        with self._changed:
            before = self.flow.outstanding_rollouts if self.flow else 0
            if work["kind"] == "train":
                self._close_train(engine, work, records)
            elif self._cells is not None:
                self._cells.close(work, records)
            self._changed.notify_all()
            if self._cells is not None or (self.flow and self.flow.outstanding_rollouts < before):
                self._supply.notify_all()
        return {}

    def hand_back(self, engine: str, work: dict[str, Any], path: str | None) -> dict[str, Any]:
        """A cell that ``engine`` cannot finish waits for another one, without having cost a try. What had ended of it
        lies in the Parquet file ``path`` and counts.
        """
        records = self.storage.read_rollouts(Path(path)) if path else ()
        with self._changed:
            if self._cells is not None:
                self._cells.give_back(work["group_id"], records, engine)
            self._changed.notify_all()
            self._supply.notify_all()
        return {}

    def retire(self, engine: str) -> dict[str, Any]:
        """``engine`` does nothing any more, for good or until it registers: what it still had goes to the others."""
        with self._changed:
            self._forget(engine)
            self._supply.notify_all()
        return {}

    def _close_train(self, engine: str, work: dict[str, Any], records: tuple[RolloutRecord, ...]) -> None:
        assert self.flow is not None
        group_id = work["group_id"]
        if work["lease_id"] in self._closed:
            return
        self._closed.add(work["lease_id"])
        if not self.flow.holds(group_id, work["lease_id"]):
            return self._note(group_id, "ignored", "its lease had been taken back", engine)
        self._count(records)
        self._judge_reward(records)
        reasons = why_ungraded(records)
        if self.flow.judge_harness(work["harness"], harness_failed(records, work["size"]), reasons):
            self._raise_alarm(work["harness"], self.flow.state.set_aside[work["harness"]])
        if not enough_graded(records, work["size"]):
            again = self.flow.fail(group_id, reasons)
            ending = "rerolled" if again else self.flow.state.ended[group_id][0]
            return self._note(group_id, ending, reasons if again else self.flow.state.ended[group_id][1], engine)
        group = to_train_group(records, work["size"], self.config.algorithm.normalize_std)
        if group is None:
            self.progress.no_contrast += 1
            self.flow.skip(group_id, "no contrast", records)
            return self._note(group_id, "skipped", "no contrast", engine)
        self._admit(group, engine)

    def _admit(self, group: TrainGroup, engine: str) -> None:
        assert self.flow is not None
        version = oldest_version(group)
        self.flow.admit(group, version)
        self._note(group.group_id, "admitted", str(version), engine)

    def _count(self, records: tuple[RolloutRecord, ...]) -> None:
        self.progress.records.extend(records)
        self.progress.rollouts += len(records)
        for record in records:
            passed = record.outcome is Outcome.SOLVED
            differs = record.info.get("tool_calls_differ")
            self.emit("rollout", harness=record.harness, reward=record.verdict.reward, passed=passed, differs=differs)

    def _judge_reward(self, records: tuple[RolloutRecord, ...]) -> None:
        """A reward function that fails costs its rollouts; one that always does would roll out for nothing, so the run
        ends.
        """
        failures, text = reward_failures(records), f"reward.fn={self.config.reward.fn} failed"
        if failures and not self._reward_alarmed:
            self._reward_alarmed = True
            self.emit("error", text=f"ALARM: {text}, such rollouts are ungraded: {failures[0]}")
        could = sum(record.verdict.correctness is not None for record in records)
        if could:
            self._reward_failures = self._reward_failures + 1 if len(failures) == could else 0
        if self._reward_failures >= REWARD_FAILURES and self.failure is None:
            groups = f"on every rollout of {self._reward_failures} groups in a row"
            self.failure, self.mistake = f"{text} {groups}: {failures[-1]}", True

    def _raise_alarm(self, harness: str, reason: str) -> None:
        """A harness was set aside: say so on the terminal and in the ledger, and keep it over a crash."""
        self.checkpoint_wanted = True
        entry = {"t": time.time(), "harness": harness, "what": "set aside", "reason": reason}
        self.lines.add(self.attempt.ledger, entry)
        self.emit("error", text=aside_text(harness, reason))

    def note_evaluation(self, checkpoint: str, text: str, alarm: bool) -> None:
        """What becomes of a checkpoint's evaluation, for the ledger and the terminal."""
        with self._changed:
            entry = {"t": time.time(), "checkpoint": checkpoint, "what": "evaluation", "reason": text}
            self.lines.add(self.attempt.ledger, entry)
            self.emit("error" if alarm else "message", text=text)

    def _note(self, group_id: str, what: str, reason: str, engine: str | None = None) -> None:
        entry = {"t": time.time(), "group": group_id, "what": what, "reason": reason}
        self.lines.add(self.attempt.ledger, entry | ({"engine": engine} if engine else {}))

    def status(self, after: int = 0) -> dict[str, Any]:
        """For the live view: the events since number ``after``, and how things stand now."""
        with self._changed:
            fresh = [event for event in self.events if event["number"] > after]
            return {"events": fresh, "now": [self._phase_now(), self._state_now()]}

    def overview(self) -> dict[str, Any]:
        """How the run stands, for `yoke status` and status.json."""
        with self._changed:
            flow, stats = self.flow, self.stats
            counted = self._cells.counts() if self._cells else {"done": None, "total": None}
            nodes = {f"node{number}" for number in range(self.config.cluster.nodes)}
            return {
                "time": time.time(),
                "attempt": self.attempt.number,
                "started": self.started,
                "phase": {"name": self.phase, **counted},
                "updates": {"done": flow.state.update if flow else 0, "planned": flow.updates if flow else 0},
                "version": str(flow.version) if flow else None,
                "rollouts": rollouts_overview(flow, self.config.algorithm, stats),
                "counts": counts_overview(flow, self._ended_groups.count(flow), stats),
                "set_aside": dict(flow.state.set_aside) if flow else {},
                "nodes": [self._node_now(name) for name in sorted({*nodes, *self.seen, *stats, *self.engines})],
                "errors": list(self.errors),
            }

    def news(self) -> tuple[Any, ...]:
        """Whatever `overview` is worth being written anew for at once."""
        return (self.phase, self.flow.state.update if self.flow else 0)

    def _node_now(self, name: str) -> dict[str, Any]:
        engine, seen = self.engines.get(name), self.seen.get(name)
        silent_s = None if seen is None else round(self._clock() - seen, 1)
        return node_overview(name, self.stats.get(name, {}), engine.weights if engine else None, silent_s)

    def _phase_now(self) -> dict[str, Any]:
        return {"kind": "phase", "name": self.phase, **(self._cells.counts() if self._cells else {})}

    def _state_now(self) -> dict[str, Any]:
        stats = self.stats.values()
        return {
            "kind": "state",
            "queue": len(self.flow.ready) if self.flow else 0,
            "in_flight": sum(s.get("in_flight", 0) for s in stats),
            "tokens_s": sum(s.get("tokens_s", 0.0) for s in stats),
        }

    # --- the trainer's side

    @property
    def stopped(self) -> bool:
        return self._stopping

    def emit(self, kind: str, **fields: Any) -> None:
        """Tell the live view."""
        with self._changed:
            self._event_count += 1
            if kind == "error":
                self.errors.append({"time": time.time(), "text": fields["text"]})
            self.events.append({"kind": kind, "number": self._event_count, **fields})

    def set_phase(self, phase: str) -> None:
        with self._changed:
            self.phase = phase
            self._supply.notify_all()

    def set_weights(self, engine: Engine, version: str) -> None:
        """``engine`` now serves ``version``; it may be given groups."""
        with self._changed:
            fresh, engine.weights = not engine.weights, version
            if fresh:
                self._supply.notify_all()

    def drop_engine(self, engine: Engine) -> None:
        """The weights of ``engine`` are in doubt: it counts as down, unless it has registered anew meanwhile."""
        with self._changed:
            if self.engines.get(engine.name) is engine:
                del self.engines[engine.name]

    def unsynced(self, version: str) -> list[Engine]:
        """Engine ranks that do not serve ``version`` yet."""
        with self._changed:
            return [engine for engine in self.engines.values() if engine.weights != version]

    def lost_engines(self, silence_s: float) -> list[str]:
        """Engine ranks that were silent for ``silence_s``; their groups and cells go back to the queue."""
        now = self._clock()
        with self._changed:
            lost = [name for name, seen in self.seen.items() if now - seen > silence_s]
            for name in lost:
                self._forget(name)
            if lost or self._audit(now):
                self._supply.notify_all()
        return lost

    def _forget(self, name: str) -> None:
        for known in (self.seen, self.engines, self.stats, self._held):
            known.pop(name, None)
        if self.flow is not None:
            self.flow.release_engine(name)
        if self._cells is not None:
            self._cells.release(name)

    def _audit(self, now: float) -> bool:
        """Take back what its engine rank did not know of twice in a row: the answer to its lease was lost on the way,
        or the rank was started anew before anyone missed it. Returns whether there was such a lease.
        """
        giver = self._cells or self.flow
        if giver is None or now < self._audit_due:
            return False
        self._audit_due = now + AUDIT_S
        heard = {name: held for name, held in self._held.items() if now - self.seen.get(name, now) < AUDIT_S}
        unheld = [
            (group_id, number) for group_id, number, name in giver.out if group_id not in heard.get(name, {group_id})
        ]
        again = [group_id for group_id, number in unheld if (group_id, number) in self._unheld]
        self._unheld = frozenset(unheld)
        for group_id in again:
            giver.give_back(group_id)
            self._note(group_id, "reclaimed", "its engine rank does not know of it")
        return bool(again)

    def wait(self, seconds: float) -> None:
        """Until something changed, at most ``seconds``."""
        with self._changed:
            self._changed.wait(seconds)

    def flow_state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the flow."""
        assert self.flow is not None
        with self._changed:
            return self.flow.state.to_json()

    def draw_ahead(self) -> None:
        """Have a curriculum draw tasks for what may be handed out before this is called again: in every wait."""
        flow = self.flow
        if flow is None or not isinstance(flow.schedule, Curriculum):
            return
        ahead = self.config.algorithm.max_outstanding_rollouts // self.config.algorithm.group_size
        while flow.schedule.horizon < flow.state.next_index + ahead:
            with self._changed:
                block = flow.schedule.draw(flow.state.difficulty)
            kept = draws.keep(block, flow.schedule, self.attempt.run, self.storage)  # the disk may be slow: no lock
            with self._changed:
                flow.schedule.add(kept)
                self._supply.notify_all()

    def take_batch(self) -> list[ReadyGroup] | None:
        assert self.flow is not None
        with self._changed:
            before = self.flow.outstanding_rollouts
            batch = self._refuse_too_old(self.flow.take_batch(self._clock()))
            if self.flow.outstanding_rollouts < before:  # what is taken, or was too old, holds no credit any more
                self._supply.notify_all()
            return batch

    def _refuse_too_old(self, batch: list[ReadyGroup] | None) -> list[ReadyGroup] | None:
        """The last look before the trainer, at the rollouts themselves. If it finds something, Yoke has a defect."""
        assert self.flow is not None
        refused = self.flow.too_old(batch or ())
        if batch is None or not refused:
            return batch
        self.flow.refuse(batch, refused)
        bound = self.config.algorithm.max_staleness
        for ready in refused:
            self._note(ready.group.group_id, "refused", f"staler than algorithm.max_staleness={bound}")
        names = ", ".join(ready.group.group_id for ready in refused)
        self.emit("error", text=f"ALARM: {names} would have been trained too late and is rolled out again: a defect")
        return None

    def finish_update(self, batch: list[ReadyGroup]) -> Progress:
        """Counts the update in the flow. Returns the figures of the groups closed since the one before."""
        assert self.flow is not None
        with self._changed:
            for ready in batch:
                self._note(ready.group.group_id, "trained", f"update {self.flow.state.update}")
            self.flow.finish_update(batch)
            progress, self.progress = self.progress, Progress()
            self._supply.notify_all()
            return progress

    def evaluate(self, cells: Cells | None) -> None:
        """Hand out ``cells`` instead of training groups, until called with None."""
        with self._changed:
            self._cells = cells
            self._supply.notify_all()

    def stop(self) -> None:
        """Every engine rank is told to end at its next call."""
        with self._changed:
            self._stopping = True
            self._supply.notify_all()
        self.lines.flush(FLUSH_S)


def aside_text(harness: str, reason: str) -> str:
    """What the person at the terminal reads of a harness that is set aside."""
    return f"ALARM: {harness} is set aside and gets no more groups (mix.readmit=[{harness}] tries it again). {reason}"


def _train_work(spec: GroupSpec, lease_id: int) -> dict[str, Any]:
    return {"kind": "train", "lease_id": lease_id, "indices": list(range(spec.size)), **spec_to_json(spec)}


def spec_to_json(spec: GroupSpec) -> dict[str, Any]:
    """A group as RPC carries it."""
    return {
        "group_id": spec.group_id,
        "task_id": spec.task.task_id,
        "task_path": str(spec.task.path),
        "harness": spec.harness,
        "pass_index": spec.pass_index,
        "size": spec.size,
    }


def spec_from_json(work: dict[str, Any]) -> GroupSpec:
    """What `spec_to_json` made."""
    task = TaskRef(work["task_id"], Path(work["task_path"]))
    return GroupSpec(work["group_id"], task, work["harness"], work["pass_index"], work["size"])

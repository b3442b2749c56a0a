"""Local rank 0: the trainer; on node 0 the coordinator's home too, and the whole run: evaluate, then update after
update, then evaluate again. The trainers of other nodes follow.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from pipeline.config import Config, UserError
from pipeline.engine.transfer import SyncTimings
from pipeline.launch.checkpoint_evaluations import CheckpointEvaluations, log_checkpoint
from pipeline.launch.cohort import pin_cohort
from pipeline.launch.coordinator import FLUSH_S, Coordinator, Engine, aside_text
from pipeline.launch.data import load_splits
from pipeline.launch.draws import open_schedule
from pipeline.launch.preflight_table import refuse_trainer
from pipeline.launch.rendezvous import ANYWHERE, join_trainers, own_host
from pipeline.launch.retention import QuotaReached, Retention
from pipeline.launch.rpc import RpcServer
from pipeline.launch.run_directory import RENDEZVOUS_S, STALL_S, Attempt
from pipeline.launch.snapshotter import Snapshotter
from pipeline.launch.storage import Saving
from pipeline.launch.team import Target, TrainerTeam
from pipeline.report.measures import evaluation_metrics
from pipeline.report.metrics import MetricsLog, begin_metrics, group_metrics, rollout_metrics
from pipeline.report.store import point, write_json
from pipeline.stages import difficulty
from pipeline.stages.evaluation import Cells, evaluation_specs
from pipeline.stages.flow import FlowState, GroupFlow, ReadyGroup
from pipeline.stages.update import fresh_state, open_trainer
from pipeline.training.checkpoint import CheckpointError
from pipeline.training.loss_weights import token_weights

log = logging.getLogger("yoke.trainer")

ENGINE_SILENCE_S = 30.0
ENGINE_STOP_S = 3.0
TOGETHER_S = 60.0  # that a run waits for the engines of other nodes when the first one is ready


class Interrupted(RuntimeError):
    """The run was asked to end, and has written a checkpoint if it could."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"asked to end ({reason})")
        self.reason = reason


class EndRequest:
    """Asked for by a signal while the trainer works in another thread: save at the next safe point, then end.

    Reasons: ``warning`` (of the end of the job's time), ``terminated`` and ``stop``; the first one counts.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.saved = False
        self._answered = threading.Event()

    def ask(self, reason: str) -> None:
        self.reason = self.reason or reason

    def wait(self, reason: str, seconds: float) -> bool:
        """Ask, and wait for the answer: whether a checkpoint was written in time."""
        self.ask(reason)
        return self._answered.wait(seconds) and self.saved

    def answer(self, saved: bool) -> None:
        """The trainer's: nothing more will be saved."""
        self.saved = self.saved or saved
        self._answered.set()


class TrainerRank:
    """The run, from the newest checkpoint to its last evaluation."""

    def __init__(self, config: Config, attempt: Attempt, end: EndRequest) -> None:
        self.config, self.attempt, self.run, self.end = config, attempt, attempt.run, end
        self.train_tasks, self.test_tasks = load_splits(config, self.run)
        self.trainer = open_trainer(config)
        self.team = TrainerTeam(config, attempt, 0, self.trainer)
        self.state = self._load_state()
        flow_state = FlowState.from_json(self.state["flow"])
        schedule = open_schedule(self.train_tasks, config, self.run, flow_state.next_index)
        self.flow = GroupFlow(
            schedule,
            config.algorithm,
            config.training.updates,
            flow_state,
            attempt.number,
            config.mix.set_aside_after,
        )
        self.coordinator = coordinator = Coordinator(config, attempt, self.flow)
        coordinator.end_asked = lambda: end.reason is not None or coordinator.interrupted
        self.storage = self.coordinator.storage
        self.saving = Saving(config.cluster.storage_wait_s, self._tell)
        history = (self.run.root, self.attempt.metrics, self.state.get("attempt"), flow_state.update)
        self.storage.publish("begin the metrics", lambda: begin_metrics(*history))
        self.metrics = MetricsLog(
            self.run.root, config.logging, asdict(config), self.attempt.metrics, self.coordinator.lines.add
        )
        self.evaluations = CheckpointEvaluations(
            config, self.run, self.team.export, self._log_checkpoint, self.coordinator.note_evaluation
        )
        self.retention = Retention(config, self.run, self.storage, self._tell, self.team.rest, self.evaluations.needed)

    def _load_state(self) -> dict[str, Any]:
        return self.trainer.load(self.run.checkpoints) or fresh_state()

    def _tell(self, kind: str, text: str) -> None:
        self.coordinator.emit(kind, text=text)

    # --- the run

    def execute(self) -> None:
        """Raises when the run cannot go on; what was checkpointed is kept."""
        token = secrets.token_hex(16)
        host = own_host(self.config.cluster)
        server = RpcServer(self.coordinator.methods, token, host if self.config.cluster.nodes == 1 else ANYWHERE, host)
        self._publish("coordinator", {"url": server.url, "token": token})
        snapshots = Snapshotter(
            self.run.status, self.coordinator.overview, self.coordinator.news, self.attempt.check_fence
        )
        try:
            self._recall_alarms()
            self._publish_difficulty()
            with self._phase("start"):
                self._await_engine()
                self._compare_with_engine()
            self._publish("ready", {"engines": sorted(self.coordinator.engines), "time": time.time()})
            self._evaluate("before", self.config.evaluation.before and self.flow.state.update == 0)
            with self._phase("train"):
                self._train()
            self._evaluate("after", self.config.evaluation.after)
            self._finish()
            self.team.end()
        except Interrupted:
            self.team.end()
            raise
        finally:
            self.end.answer(saved=False)
            self.coordinator.stop()
            time.sleep(ENGINE_STOP_S)  # engine ranks learn of it by their next heartbeat
            server.stop()
            snapshots.stop()
            self.metrics.close()
            self.team.close()

    def _recall_alarms(self) -> None:
        """Which harnesses an earlier attempt set aside. Raises UserError when none is left."""
        for harness in self.flow.readmit(self.config.mix.readmit):
            self.coordinator.emit("message", text=f"{harness} was set aside and is tried again")
        for harness, reason in self.flow.state.set_aside.items():
            self.coordinator.emit("error", text=aside_text(harness, reason))
        self._check_stranded()

    def _check_stranded(self) -> None:
        """Raises UserError when every harness is set aside and no group is out any more."""
        if self.flow.stranded and not self.flow.leases and self.flow.state.update < self.config.training.updates:
            reasons = "; ".join(f"{harness}: {reason}" for harness, reason in self.flow.state.set_aside.items())
            names = ",".join(self.flow.state.set_aside)
            raise UserError(f"every harness of the mix is set aside; mend them, then mix.readmit=[{names}]. {reasons}")

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.coordinator.set_phase(name)
        self._phase_name, self._phase_since = name, time.monotonic()
        try:
            yield
        finally:
            self._account()

    def _account(self) -> None:
        """Add the time since the last call to the phase that is on, so that a checkpoint holds it."""
        now = time.monotonic()
        wall = self.state["wall_s"]
        wall[self._phase_name] = wall.get(self._phase_name, 0.0) + now - self._phase_since
        self._phase_since = now

    def _await_engine(self) -> None:
        """Wait for the first engine, and a little longer for the others, so that all nodes begin together."""
        deadline = time.monotonic() + self.config.engine.start_timeout_s + RENDEZVOUS_S
        while True:
            if self._sync_engines():
                deadline = min(deadline, time.monotonic() + TOGETHER_S)
            serving = len(self.coordinator.engines) - len(self.coordinator.unsynced(str(self.flow.version)))
            late = time.monotonic() > deadline
            if serving == self.config.cluster.nodes or (serving and late):
                return
            self._check_the_others()
            if late:
                raise TimeoutError("no engine rank registered in time; see the logs of the attempt")
            self.coordinator.wait(0.5)

    def _compare_with_engine(self) -> None:
        """Raises UserError when this node's engine, which now has the trainer's weights, computes another model."""
        if own := self.coordinator.engines.get("node0"):  # only that one can be reached from here
            return refuse_trainer(self.config, own.url, self.team.forward)
        log.warning("node 0's engine is not up yet: its logprobs are not compared with the trainer's at the start")

    def _check_the_others(self) -> None:
        """Called in every wait; raises when waiting is of no use: failed or silent engines, a ghost, an interrupt."""
        self.storage.glance()
        self._check_end()
        self.team.rest()
        if self.coordinator.failure:
            raise (UserError if self.coordinator.mistake else RuntimeError)(self.coordinator.failure)
        if self.storage.lost:
            raise self.storage.lost
        if self.coordinator.checkpoint_wanted or self.saving.due:
            self.coordinator.checkpoint_wanted = False
            self.save()
        for name in self.coordinator.lost_engines(ENGINE_SILENCE_S):
            log.warning("engine rank %s was silent for %.0f s; its groups are scheduled again", name, ENGINE_SILENCE_S)
            if not self.coordinator.seen:
                raise RuntimeError(f"engine rank {name} was silent for {ENGINE_SILENCE_S:.0f} s, and there is no other")

    def _check_end(self) -> None:
        reason = self.end.reason or ("stop" if self.coordinator.interrupted else None)
        if reason is not None:
            self.end.answer(saved=self.save())
            raise Interrupted(reason)

    def _train(self) -> None:
        self.retention.look()
        while self.flow.state.update < self.config.training.updates:
            waited = time.monotonic()
            batch = self._await_batch()
            waited = time.monotonic() - waited
            self._update(batch, waited)
            if (self._checkpoint_due() or self.saving.failing) and self.save():
                self.retention.look()
            self._check_end()
        self.flow.close_books()
        self._insist(self._write_checkpoint)

    def _checkpoint_due(self) -> bool:
        return self.flow.state.update % self.config.training.checkpoint_every == 0

    def _await_batch(self) -> list[ReadyGroup]:
        """Wait for the next update's groups, keeping engines synced and watched meanwhile."""
        deadline = time.monotonic() + STALL_S
        while True:
            self.coordinator.draw_ahead()
            batch = self.coordinator.take_batch()
            if batch is not None:
                return batch
            self._check_the_others()
            self._check_stranded()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no batch within {STALL_S:g} s: {self.coordinator.status()['now']}")
            self._sync_engines()
            self.coordinator.wait(0.5)

    def _update(self, batch: list[ReadyGroup], waited_s: float) -> None:
        started = time.monotonic()
        groups = [ready.group for ready in batch]
        metrics = self.team.update(groups, self.flow.version)
        if groups:
            metrics |= group_metrics(groups, self.flow.version, token_weights(groups, self.config.algorithm))
        self.storage.glance()
        dropped = self.flow.dropped_stale
        progress = self.coordinator.finish_update(batch)
        timings = self._sync_engines()
        self.state["rollouts"] += progress.rollouts
        metrics |= rollout_metrics(progress.records)
        if timings is not None:
            metrics |= sync_metrics(timings)
        step_s = waited_s + time.monotonic() - started
        metrics |= {
            "perf/rollout_wait_s": waited_s,
            "perf/step_s": step_s,
            "perf/trained_tok_s_wall_clock": metrics.get("batch/trained_tokens_per_step", 0.0) / step_s,
            "sample/dropped_stale_total": float(dropped),
            "sample/no_contrast_groups": float(progress.no_contrast),
            "sample/rollout_queue_size": float(len(self.flow.ready)),
            "rollouts_total": float(self.state["rollouts"]),
            "harnesses_set_aside": float(len(self.flow.state.set_aside)),
            **{f"{harness}/set_aside": 1.0 for harness in self.flow.state.set_aside},
        }
        self.metrics.log(self.flow.state.update, metrics)
        self.coordinator.emit("update", update=self.flow.state.update, metrics=metrics)

    # --- engines

    def _sync_engines(self) -> SyncTimings | None:
        """Push the current weights into every engine that lacks them, each by its own node's trainer.

        Returns the slowest push's timings, None when none was made.
        """
        engines = {engine.name: engine for engine in self.coordinator.unsynced(str(self.flow.version))}
        if not engines:
            return None
        pushed = self.team.push([_target(engine) for engine in engines.values()], self.flow.version)
        for result in pushed:
            if result.timings is not None:
                self.coordinator.set_weights(engines[result.name], str(self.flow.version))
            else:
                self.coordinator.drop_engine(engines[result.name])
        made = [result.timings for result in pushed if result.timings is not None]
        return max(made, key=lambda timings: timings.total_s, default=None)

    # --- evaluation, checkpoints, the end

    def _evaluate(self, label: str, wanted: bool) -> None:
        if not wanted:
            return
        evaluation = self.config.evaluation
        specs = evaluation_specs(self.test_tasks, self.config.mix.harnesses, evaluation.rollouts_per_task)
        directory = self.run.evaluation(label)
        pin = partial(pin_cohort, self.config, self.run, label, self.config.mix.harnesses)
        self.storage.insist(f"write {directory}", pin)
        cells = self.storage.insist(f"read {directory}", lambda: Cells(directory, specs, evaluation.retries))
        with self._phase(f"evaluate_{label}"):
            self._work_through(cells)
        coverage = self.storage.insist(f"read {directory}", cells.coverage)
        found = self.storage.insist(f"read {directory}", cells.records)
        values = evaluation_metrics(found, coverage.planned)
        self.metrics.log(self.flow.state.update, values)
        self.metrics.rollouts(self.flow.state.update, label, lambda: found)
        text = (
            f"evaluation {label}: pass@1 {values.get('eval/pass@1', 0.0):.1%}, {coverage.graded} of {coverage.planned}"
        )
        self.coordinator.emit("message", text=text + " rollouts graded")

    def _log_checkpoint(self, update: int, values: Mapping[str, float]) -> None:
        """An evaluation that a job of its own has made, at the update that it is of."""
        log_checkpoint(self.metrics, self.run, update, values)

    def _work_through(self, cells: Cells) -> None:
        self.coordinator.evaluate(cells)
        deadline = time.monotonic() + STALL_S + 60.0 * len(self.test_tasks)
        while not cells.done:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the evaluation did not end: {cells.counts()}")
            self._check_the_others()
            self._sync_engines()
            self.coordinator.wait(0.5)
        self.coordinator.evaluate(None)

    def save(self) -> bool:
        """Whether a checkpoint was written. One that fails is tried again, until `Saving` gives up."""
        try:
            self._write_checkpoint()
        except CheckpointError as error:
            self.saving.failed(error)
            return False
        self.saving.worked()
        return True

    def _write_checkpoint(self) -> None:
        """Raises FencedOff when a newer attempt has taken the run over."""
        self.storage.publish("look for a newer attempt", lambda: None)
        self._account()
        self.state |= {"flow": self.coordinator.flow_state(), "attempt": self.attempt.number}
        self.team.save(self.run.checkpoints, self.state)
        self.coordinator.lines.flush(FLUSH_S)
        self._publish_difficulty()
        self.evaluations.saved(self.flow.state.update)

    def _publish_difficulty(self) -> None:
        """As the newest checkpoint has it."""
        flow = FlowState.from_json(self.state["flow"])
        found = difficulty.report(flow.difficulty, flow.update)
        self.storage.publish("write difficulty.json", lambda: write_json(self.run.difficulty, found))

    def _insist(self, write: Callable[[], None]) -> None:
        """Until a collective ``write`` works. Raises StorageLost when it has been failing for too long."""
        while True:
            try:
                write()
                return self.saving.worked()
            except CheckpointError as error:
                self.saving.failed(error)
            while not self.saving.due:
                self.storage.glance()
                self.team.rest()
                self.coordinator.wait(0.2)

    def _publish(self, name: str, record: dict[str, Any]) -> None:
        self.storage.publish(f"write {name}.json", lambda: self.attempt.publish(name, record))

    def _finish(self) -> None:
        """The last checkpoint, its model for vLLM and others under ``model``, and word that the run is done."""
        self._insist(self._write_checkpoint)
        place = self.attempt.root / "model"
        self._insist(lambda: self.team.export(place))
        link = self.run.root / "model"
        self.storage.publish("link the model", lambda: point(link, place.relative_to(self.run.root)))
        try:
            self.retention.look()
        except QuotaReached as error:  # there is nothing left to stop
            self._tell("error", f"ALARM: {error}")
        self.evaluations.close()
        kept = {key: self.state[key] for key in ("wall_s", "rollouts")}
        self._publish("done", kept | {"set_aside": self.flow.state.set_aside})


def sync_metrics(timings: SyncTimings) -> dict[str, float]:
    """A push as metrics: all of it, how long the engine stood still, and each phase."""
    phases = {f"perf/weight_sync/{name}_s": seconds for name, seconds in timings.phases.items()}
    return {"perf/weight_sync_s": timings.total_s, "perf/weight_sync_still_s": timings.still_s, **phases}


def _target(engine: Engine) -> Target:
    return Target(engine.name, engine.url, engine.control_url, fresh=not engine.weights)


def run_trainer(config: Config, attempt: Attempt, node: int = 0, end: EndRequest | None = None) -> None:
    """A trainer rank's program; node 0 leads. Raises Interrupted after a checkpoint that ``end`` asked for."""
    join_trainers(attempt, config.cluster, node)
    if node == 0:
        return TrainerRank(config, attempt, end or EndRequest()).execute()
    trainer = open_trainer(config)
    trainer.load(attempt.run.checkpoints)
    team = TrainerTeam(config, attempt, node, trainer)
    try:
        team.follow()
    finally:
        team.close()

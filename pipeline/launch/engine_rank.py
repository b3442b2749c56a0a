"""Local rank 1: vLLM, the proxy's shards, rollouts and verification.

It leases groups from the coordinator and returns them closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pipeline.capture.supervisor import ShardSupervisor
from pipeline.config import Config, UserError
from pipeline.engine.server import SERVED_MODEL_NAME, EngineError, EngineServer, Server
from pipeline.harness.base import harness_root
from pipeline.hub import local_model
from pipeline.launch.coordinator import LONG_POLL_S, spec_from_json
from pipeline.launch.health import HealthProbe
from pipeline.launch.kept import KeptRollouts, group_name, rollout_name
from pipeline.launch.preflight_table import refuse_engine, refuse_node
from pipeline.launch.rpc import RpcClient, RpcError, RpcServer
from pipeline.launch.run_directory import RENDEZVOUS_S, Attempt
from pipeline.launch.storage import Storage
from pipeline.records import GroupSpec, Outcome, PolicyVersion, RolloutRecord
from pipeline.report.store import write_group
from pipeline.sandbox.base import make_sandbox
from pipeline.stages.evaluation import is_graded, write_cell
from pipeline.stages.rollout import Workshop, ended_by_signal, ended_with_the_job

log = logging.getLogger("yoke.engine")

HEARTBEAT_S = 1.0
WATCH_S = 0.5
COORDINATOR_SILENCE_S = 20.0
WORD_TRIES = 10
SIGNAL_S = 0.5  # within which a signal to the whole job has reached rank 0 too
OUTAGE_S = 120.0  # a harness's call outlives an engine restart of this length
CLOSE_S = 60.0  # that a closed group may take on its way, beyond the time for the file system
CLOSE_TRIES = 3
CALL_THREADS = 8
FILE_THREADS = 16  # what hangs on the shared file system waits here, and nothing else with it
STORAGE_TRIES = 3

T = TypeVar("T")


class EngineRank:
    """One node's engine, from start to the coordinator's word to stop."""

    def __init__(
        self,
        config: Config,
        attempt: Attempt,
        node: int,
        snapshots: Path | None = None,
        devices: str | None = None,
        pooled: bool = False,
    ) -> None:
        """``devices``: GPUs of its own (CUDA_VISIBLE_DEVICES). ``pooled``: others beside it do the same work, with
        the same weights, so what it cannot go on with is theirs; ``node`` then only tells it from them.
        """
        self.config, self.attempt, self.name = config, attempt, f"node{node}"
        self.snapshots, self.pooled = snapshots, pooled
        self.scratch = attempt.new_scratch(self.name)
        self.server = self._make_server(node, devices)
        self.supervisor = self._make_supervisor()
        self.slots = asyncio.Semaphore(config.concurrency)
        self.groups: dict[str, asyncio.Task[None]] = {}
        self.queued = 0
        self.in_flight = 0
        self.tokens: list[tuple[float, int]] = []
        self.restarts = 0
        self.health = HealthProbe()
        self.kept = KeptRollouts(attempt)
        self.up = asyncio.Event()
        self.last_down = time.monotonic()
        self.restart_wanted = False
        self.closing: set[str] = set()  # groups whose rollouts have all ended
        self.giving_up = False  # what is open here is on its way to the other engines
        self.stopping = asyncio.Event()
        self.failure: BaseException | None = None
        self.calls = ThreadPoolExecutor(CALL_THREADS, thread_name_prefix="rpc")
        self.files = ThreadPoolExecutor(FILE_THREADS, thread_name_prefix="files")
        self.storage = Storage(attempt, config.cluster.storage_wait_s, self._tell)

    def _make_server(self, node: int, devices: str | None) -> Server:
        log_path = self.attempt.logs / f"vllm-{self.name}.log"
        return EngineServer(self.config.engine, self.config.model, log_path, self.scratch, node, devices)

    def _make_supervisor(self) -> ShardSupervisor:
        engine = self.config.engine
        return ShardSupervisor(
            self.server.url, engine.shards, self.scratch / "journal", SERVED_MODEL_NAME, engine.request_timeout_s,
            OUTAGE_S,
        )  # fmt: skip

    async def run(self) -> None:
        """Serve until the coordinator says stop. Raises when vLLM cannot be kept alive or the coordinator is gone."""
        self.coordinator, token = await self._find_coordinator()
        loop = asyncio.get_running_loop()
        self.control = RpcServer(
            {
                "policy_version": lambda version: self._policy_version(loop, version),
                "restart_engine": self._restart_engine,
            },
            token,
        )
        try:
            await self._start_engine()
            await self.supervisor.start()
            self.workshop = self._workshop()
            await self._register()
            await self._serve()
        except Exception as error:
            if isinstance(error, RpcError) and await self._is_over():
                return log.info("the run ended while this engine was starting")
            await self._report(error)
            raise
        finally:
            await self._shut_down()

    async def _is_over(self) -> bool:
        """Whether the coordinator is gone because the run is done or was stopped; its word of that comes late."""
        for _ in range(WORD_TRIES):
            if await self._read("done") is not None or await self._read("stopped") is not None:
                return True
            await asyncio.sleep(0.5)
        return False

    async def _report(self, error: Exception) -> None:
        """Let the trainer end the attempt at once, instead of waiting for what will not come."""
        with suppress(RpcError):
            reason, mistake = f"{type(error).__name__}: {error}", isinstance(error, UserError)
            await self._call("fail", 5.0, reason=str(error) if mistake else reason, mistake=mistake)

    def _tell(self, kind: str, text: str) -> None:
        """An alarm on its way to the terminal; called in threads."""
        with suppress(RpcError):
            self.coordinator.call("tell", 5.0, engine=self.name, kind=kind, text=text)

    async def _find_coordinator(self) -> tuple[RpcClient, str]:
        """The coordinator and the token of this attempt's calls."""
        deadline = time.monotonic() + RENDEZVOUS_S
        while time.monotonic() < deadline:
            record = await self._read("coordinator")
            if record is not None:
                return RpcClient(record["url"], record["token"]), record["token"]
            failed = await self._read("failed")
            if failed is not None:
                raise RuntimeError(f"the {failed['rank']} rank failed: {failed['text']}")
            await asyncio.sleep(0.2)
        raise TimeoutError(f"no coordinator within {RENDEZVOUS_S:g} s in {self.attempt.root}")

    async def _read(self, name: str) -> dict[str, Any] | None:
        with suppress(OSError):  # tried again by the caller
            return await self._in_file_thread(partial(self.attempt.read, name))
        return None

    async def _in_file_thread(self, action: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.files, action)

    def _workshop(self) -> Workshop:
        return Workshop(
            sandbox=make_sandbox(self.config.sandbox),
            supervisor=self.supervisor,
            harness=self.config.harness,
            scratch=self.scratch,
            harness_home=harness_root(self.config.harness.home),
            context_tokens=self.config.model.max_model_len,
            snapshots=self.snapshots,
            engine_trouble_since=self._trouble_since,
        )

    async def _start_engine(self) -> None:
        if not self.restarts:
            await asyncio.to_thread(refuse_node, self.config)
        model = await asyncio.to_thread(local_model, self.config.model.path)
        self.server.start(model, self._engine_seed())
        await asyncio.to_thread(self.server.wait_ready, self.config.engine.start_timeout_s)
        await asyncio.to_thread(self.server.warm_up)
        if not self.restarts:
            await asyncio.to_thread(refuse_engine, self.config, self.server.url)
        self.last_down = time.monotonic()
        self.up.set()

    def _trouble_since(self, moment: float) -> bool:
        """Whether the engine was down at any time after ``moment`` (monotonic clock)."""
        return not self.up.is_set() or self.last_down > moment

    def _engine_seed(self) -> int:
        """Another one at every start: vLLM's own default would sample the same numbers again after each."""
        return random.Random(f"{self.config.seed}/{self.attempt.number}/{self.name}/{self.restarts}").getrandbits(31)

    async def _register(self) -> None:
        await self._call("register", url=self.server.url, control_url=self.control.url)

    async def _call(self, method: str, timeout_s: float = 30.0, **arguments: Any) -> dict[str, Any]:
        call = partial(self.coordinator.call, method, timeout_s, engine=self.name, **arguments)
        return await asyncio.get_running_loop().run_in_executor(self.calls, call)

    def _policy_version(self, loop: asyncio.AbstractEventLoop, version: str) -> dict[str, Any]:
        """RPC from the trainer while the engine is paused: new calls are salted with the new version."""
        change = self.supervisor.set_policy_version(PolicyVersion.parse(version))
        asyncio.run_coroutine_threadsafe(change, loop).result(self.config.engine.sync_timeout_s)
        return {}

    def _restart_engine(self) -> dict[str, Any]:
        """RPC from the trainer after a sync that failed half-way: the watcher starts vLLM again."""
        self.restart_wanted = True
        return {}

    async def _serve(self) -> None:
        watchers = [asyncio.create_task(self._heartbeat()), asyncio.create_task(self._watch_engine())]
        try:
            leasing = asyncio.create_task(self._lease_groups())
            done, _ = await asyncio.wait([*watchers, leasing], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if self.failure is not None:
                raise self.failure
        finally:
            tasks = [*watchers, leasing, *self.groups.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # --- groups

    async def _lease_groups(self) -> None:
        """Keep just enough groups here that no slot is idle."""
        while not self.stopping.is_set():
            if self._has_enough():
                await asyncio.sleep(0.05)
                continue
            try:
                answer = await self._call("lease", LONG_POLL_S + 30)
            except RpcError as error:
                log.warning("lease: %s", error)
                await asyncio.sleep(1.0)
                continue
            if answer["stop"]:
                self.stopping.set()
            elif answer["work"] is not None:
                self._begin(answer["work"])

    def _has_enough(self) -> bool:
        """One of several takes nothing that it would let lie: another one may be free earlier."""
        return self.queued + (self.in_flight if self.pooled else 0) >= self.config.concurrency

    def _begin(self, work: dict[str, Any]) -> None:
        earlier = self.groups.get(work["group_id"])
        if earlier is not None:  # its lease was taken back and the group leased anew: one writer a group
            earlier.cancel()
        self.queued += len(work["indices"])
        task = asyncio.create_task(self._do(work, earlier))
        self.groups[work["group_id"]] = task
        task.add_done_callback(lambda done: self._group_done(work["group_id"], done))

    def _group_done(self, group_id: str, task: asyncio.Task[None]) -> None:
        if self.groups.get(group_id) is task:
            del self.groups[group_id]
            self.closing.discard(group_id)
        if not task.cancelled() and task.exception() is not None:
            self.failure = task.exception()
            self.stopping.set()

    async def _do(self, work: dict[str, Any], earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await asyncio.wait([earlier])
        spec = spec_from_json(work)
        if self.pooled and not self.up.is_set():  # it was leased when the engine had just died
            return await self._hand_back(work, spec, [])
        rollouts = [asyncio.ensure_future(self._one(spec, index, work)) for index in work["indices"]]
        try:
            records = await asyncio.gather(*rollouts)
        except asyncio.CancelledError:
            if not self.giving_up:
                raise
            return await self._hand_back(work, spec, [done.result() for done in rollouts if _has_result(done)])
        self.closing.add(spec.group_id)
        await self._hand_in("close", work, await self._publish(work, spec, records))
        await self._in_file_thread(partial(self._forget_rollouts, spec, work["indices"]))

    async def _publish(self, work: dict[str, Any], spec: GroupSpec, records: list[RolloutRecord]) -> Path:
        write = partial(self._write, work, spec, records)
        return await self._in_file_thread(partial(self.storage.publish, f"write {spec.group_id}", write))

    async def _hand_back(self, work: dict[str, Any], spec: GroupSpec, ended: list[RolloutRecord]) -> None:
        """Have another engine finish a cell; the grades of what ``ended`` of it stand."""
        graded = [record for record in ended if is_graded(record)]
        await self._hand_in("hand_back", work, await self._publish(work, spec, graded) if graded else None)

    def _write(self, work: dict[str, Any], spec: GroupSpec, records: list[RolloutRecord]) -> Path:
        if work["kind"] == "evaluate":
            return write_cell(Path(work["path"]), records)
        path = self.attempt.groups / group_name(spec)
        write_group(path, records)
        return path

    def _forget_rollouts(self, spec: GroupSpec, indices: list[int]) -> None:
        with suppress(OSError):  # they only take room
            for index in indices:
                self._rollout_file(spec, index).unlink(missing_ok=True)

    async def _hand_in(self, method: str, work: dict[str, Any], path: Path | None) -> None:
        """Hand a group in. The coordinator reads its file first, which may take as long as the file system is away."""
        place = None if path is None else str(path)
        deadline = time.monotonic() + self.config.cluster.storage_wait_s + CLOSE_S
        refused = 0
        while True:
            try:
                call = partial(self.coordinator.call, method, engine=self.name, work=work, path=place)
                await self._in_file_thread(call)
                return
            except RpcError as error:
                refused += error.__cause__ is None  # it answered, with an error
                if refused == CLOSE_TRIES or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(1.0)

    async def _one(self, spec: GroupSpec, index: int, work: dict[str, Any]) -> RolloutRecord:
        kept = await self._in_file_thread(partial(self._kept, spec, index, work))
        if kept is not None:
            self.queued -= 1
            return kept
        waiting = True
        try:
            async with self.slots:
                await self.up.wait()
                self.queued, waiting = self.queued - 1, False
                self.in_flight += 1
                try:
                    record = await self._roll_out(spec, index)
                finally:
                    self.in_flight -= 1
        finally:
            self.queued -= waiting
        self.tokens.append((time.monotonic(), record.sampled_tokens))
        if work["kind"] == "train":
            write = partial(write_group, self._rollout_file(spec, index), [record])
            await self._in_file_thread(partial(self.storage.publish, f"write {spec.group_id}-{index}", write))
        return record

    async def _roll_out(self, spec: GroupSpec, index: int) -> RolloutRecord:
        """A rollout. What was spoilt while a shared file system was away is made again once that is back."""
        places = [spec.task.path, self.workshop.harness_home]
        for last in (False,) * (STORAGE_TRIES - 1) + (True,):
            started = time.monotonic()
            await self._in_file_thread(partial(self.storage.was_away, started, places))
            record = await self.workshop.roll_out(spec, index)
            if ended_by_signal(record) and await self._job_is_ending():
                return ended_with_the_job(record)
            if last or record.outcome is not Outcome.INFRASTRUCTURE:
                break
            if not await self._in_file_thread(partial(self.storage.was_away, started, places)):
                break
        return record

    async def _job_is_ending(self) -> bool:
        """Asked of rank 0, which hears of the end by a signal of its own; its silence is a yes."""
        await asyncio.sleep(SIGNAL_S)
        try:
            return bool((await self._call("ending", 10.0))["ending"])
        except RpcError:
            return True

    def _rollout_file(self, spec: GroupSpec, index: int) -> Path:
        return self.attempt.rollouts / rollout_name(spec, index)

    def _kept(self, spec: GroupSpec, index: int, work: dict[str, Any]) -> RolloutRecord | None:
        """A graded rollout of an earlier attempt, fresh enough and of weights that led to the present ones."""
        if work["kind"] != "train":
            return None
        try:
            return self.kept.find(spec, index, work)
        except (OSError, UserError) as error:  # they only save work
            log.warning("kept rollouts are passed over: %s", error)
            return None

    # --- watching

    async def _heartbeat(self) -> None:
        last_answer = time.monotonic()
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                answer = await self._call("heartbeat", 10.0, stats=self._stats(), held=list(self.groups))
            except RpcError as error:
                if time.monotonic() - last_answer > COORDINATOR_SILENCE_S:
                    raise RuntimeError(f"the coordinator was silent for {COORDINATOR_SILENCE_S:g} s") from error
                continue
            last_answer = time.monotonic()
            if answer["stop"]:
                return self.stopping.set()
            if not answer["known"] and self.up.is_set():
                await self._register()  # it took us for dead

    def _stats(self) -> dict[str, Any]:
        now = time.monotonic()
        self.tokens = [(t, n) for t, n in self.tokens if now - t < 30]
        shards = self.supervisor.stats()
        return {
            "in_flight": self.in_flight,
            "queued": self.queued,
            "tokens_s": sum(n for _, n in self.tokens) / 30,
            "engine_restarts": self.restarts,
            "counters": dict(self.workshop.counters),
            "shards": shards,
            "health": self.health.latest(),
        }

    async def _watch_engine(self) -> None:
        """Start a dead or doubtful vLLM again; the trainer pushes the weights when it registers again."""
        while True:
            await asyncio.sleep(WATCH_S)
            if self.server.alive() and not self.restart_wanted:
                continue
            self.up.clear()
            self.restarts += 1
            await self._call("unregister")
            if self.pooled:
                await self._give_all_back()
            if self.restarts > self.config.engine.max_restarts:
                raise RuntimeError(f"vLLM died {self.restarts} times; its log: {self.server.log_path}")
            log.warning("vLLM is dead or in doubt, starting it again (%d)", self.restarts)
            await asyncio.to_thread(self.server.stop)
            self.restart_wanted = False
            await self._restart()

    async def _restart(self) -> None:
        try:
            await self._start_engine()
        except EngineError as error:
            if not self.pooled:
                raise
            log.warning("%s did not come up: %s", self.name, error)  # the others go on meanwhile
            self.restart_wanted = True
        else:
            await self._register()

    async def _give_all_back(self) -> None:
        """Harnesses would wait for the engine to come back; others can begin their cells at once."""
        self.giving_up = True
        try:
            for group_id in self.groups.keys() - self.closing:
                self.groups[group_id].cancel()
            await asyncio.gather(*self.groups.values(), return_exceptions=True)
            await self._call("retire")
        finally:
            self.giving_up = False

    async def _shut_down(self) -> None:
        self.storage.close()
        await self.supervisor.stop()
        await asyncio.to_thread(self.server.close)
        self.control.stop()
        self.calls.shutdown(wait=False)
        self.files.shutdown(wait=False, cancel_futures=True)
        shutil.rmtree(self.scratch, ignore_errors=True)


def _has_result(rollout: asyncio.Future[RolloutRecord]) -> bool:
    return rollout.done() and not rollout.cancelled() and rollout.exception() is None


def run_engine(config: Config, attempt: Attempt, node: int, snapshots: Path | None = None) -> None:
    """The engine rank's program. ``snapshots``: a directory that keeps every workspace for a later verification."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    asyncio.run(EngineRank(config, attempt, node, snapshots).run())

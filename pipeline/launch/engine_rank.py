"""Local rank 1: vLLM, the proxy's shards, rollouts and verification.

It leases groups from the coordinator and returns them closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from pipeline.capture.supervisor import ShardSupervisor
from pipeline.config import Config
from pipeline.engine.server import SERVED_MODEL_NAME, EngineServer
from pipeline.harness.base import DEFAULT_ROOT
from pipeline.launch.coordinator import LONG_POLL_S, spec_from_json
from pipeline.launch.rpc import RpcClient, RpcError, RpcServer
from pipeline.launch.run_directory import Attempt
from pipeline.records import GroupSpec, PolicyVersion, RolloutRecord
from pipeline.report.store import read_group, write_group
from pipeline.sandbox.base import make_sandbox
from pipeline.stages.evaluation import merge, read_cell
from pipeline.stages.rollout import Workshop

log = logging.getLogger("yoke.engine")

HEARTBEAT_S = 1.0
COORDINATOR_SILENCE_S = 60.0
RENDEZVOUS_S = 300.0


class EngineRank:
    """One node's engine, from start to the coordinator's word to stop."""

    def __init__(self, config: Config, attempt: Attempt, node: int, snapshots: Path | None = None) -> None:
        self.config, self.attempt, self.name = config, attempt, f"node{node}"
        self.snapshots = snapshots
        self.scratch = Path(tempfile.mkdtemp(prefix="yoke-"))
        self.server = EngineServer(config.engine, config.model, attempt.logs / f"vllm-{self.name}.log", self.scratch)
        self.supervisor = ShardSupervisor(
            self.server.url, config.engine.shards, self.scratch / "journal", SERVED_MODEL_NAME
        )
        self.slots = asyncio.Semaphore(config.concurrency)
        self.groups: set[asyncio.Task[None]] = set()
        self.queued = 0
        self.in_flight = 0
        self.tokens: list[tuple[float, int]] = []
        self.restarts = 0
        self.starting = True
        self.stopping = asyncio.Event()
        self.failure: BaseException | None = None

    async def run(self) -> None:
        """Serve until the coordinator says stop. Raises when vLLM cannot be kept alive or the coordinator is gone."""
        self.coordinator = await self._find_coordinator()
        loop = asyncio.get_running_loop()
        token = (self.attempt.read("coordinator") or {})["token"]
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
        finally:
            await self._shut_down()

    async def _find_coordinator(self) -> RpcClient:
        deadline = time.monotonic() + RENDEZVOUS_S
        while time.monotonic() < deadline:
            record = self.attempt.read("coordinator")
            if record is not None:
                return RpcClient(record["url"], record["token"])
            await asyncio.sleep(0.2)
        raise TimeoutError(f"no coordinator within {RENDEZVOUS_S:g} s in {self.attempt.root}")

    def _workshop(self) -> Workshop:
        return Workshop(
            sandbox=make_sandbox(self.config.sandbox),
            supervisor=self.supervisor,
            harness=self.config.harness,
            scratch=self.scratch,
            harness_home=Path(self.config.harness.home or DEFAULT_ROOT),
            snapshots=self.snapshots,
            engine_starts=lambda: self.restarts,
        )

    async def _start_engine(self) -> None:
        self.starting = True
        self.server.start(self.config.model.path, self._engine_seed())
        await asyncio.to_thread(self.server.wait_ready, self.config.engine.start_timeout_s)
        await asyncio.to_thread(self.server.warm_up)
        self.starting = False

    def _engine_seed(self) -> int:
        """Another one at every start: vLLM's own default would sample the same numbers again after each."""
        return random.Random(f"{self.config.seed}/{self.attempt.number}/{self.name}/{self.restarts}").getrandbits(31)

    async def _register(self) -> None:
        await self._call("register", url=self.server.url, control_url=self.control.url)

    async def _call(self, method: str, timeout_s: float = 30.0, **arguments: Any) -> dict[str, Any]:
        return await asyncio.to_thread(self.coordinator.call, method, timeout_s, engine=self.name, **arguments)

    def _policy_version(self, loop: asyncio.AbstractEventLoop, version: str) -> dict[str, Any]:
        """RPC from the trainer while the engine is paused: new calls are salted with the new version."""
        change = self.supervisor.set_policy_version(PolicyVersion.parse(version))
        asyncio.run_coroutine_threadsafe(change, loop).result(self.config.engine.sync_timeout_s)
        return {}

    def _restart_engine(self) -> dict[str, Any]:
        """RPC from the trainer after a sync that failed half-way: the watcher starts vLLM again."""
        if not self.starting:
            self.server.stop()
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
            for task in [*watchers, leasing, *self.groups]:
                task.cancel()
            await asyncio.gather(*watchers, leasing, *self.groups, return_exceptions=True)

    # --- groups

    async def _lease_groups(self) -> None:
        """Keep just enough groups here that no slot is idle."""
        while not self.stopping.is_set():
            if self.queued >= self.config.concurrency:
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

    def _begin(self, work: dict[str, Any]) -> None:
        self.queued += len(work["indices"])
        task = asyncio.create_task(self._do(work))
        self.groups.add(task)
        task.add_done_callback(self._group_done)

    def _group_done(self, task: asyncio.Task[None]) -> None:
        self.groups.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.failure = task.exception()
            self.stopping.set()

    async def _do(self, work: dict[str, Any]) -> None:
        spec = spec_from_json(work)
        path = Path(work["path"]) if work["kind"] == "evaluate" else self.attempt.groups / f"{spec.group_id}.parquet"
        records = await asyncio.gather(*(self._one(spec, index, work) for index in work["indices"]))
        if work["kind"] == "evaluate":
            records = merge(read_cell(path), records)
        write_group(path, records)
        await self._close(work, path)
        for index in work["indices"]:
            self._rollout_file(self.attempt, spec, index).unlink(missing_ok=True)

    async def _close(self, work: dict[str, Any], path: Path) -> None:
        for last in (False, False, True):
            try:
                await self._call("close", work=work, path=str(path))
                return
            except RpcError:
                if last:
                    raise
                await asyncio.sleep(1.0)

    async def _one(self, spec: GroupSpec, index: int, work: dict[str, Any]) -> RolloutRecord:
        kept = self._kept(spec, index, work)
        if kept is not None:
            self.queued -= 1
            return kept
        async with self.slots:
            self.queued -= 1
            self.in_flight += 1
            try:
                record = await self.workshop.roll_out(spec, index)
            finally:
                self.in_flight -= 1
        self.tokens.append((time.monotonic(), record.sampled_tokens))
        if work["kind"] == "train":
            write_group(self._rollout_file(self.attempt, spec, index), [record])
        return record

    def _rollout_file(self, attempt: Attempt, spec: GroupSpec, index: int) -> Path:
        return attempt.rollouts / f"{spec.group_id}-{index}.parquet"

    def _kept(self, spec: GroupSpec, index: int, work: dict[str, Any]) -> RolloutRecord | None:
        """A rollout that an earlier attempt finished and that is still fresh enough."""
        if work["kind"] != "train":
            return None
        for number in reversed(self.attempt.run.attempt_numbers()):
            earlier = self.attempt.run.attempt(number)
            for path in (self._rollout_file(earlier, spec, index), earlier.groups / f"{spec.group_id}.parquet"):
                if number < self.attempt.number and path.exists():
                    record = next((r for r in read_group(path) if r.index == index), None)
                    if (
                        record
                        and work["keep_from"] <= record.version.n
                        and record.newest_version.n <= work["resumed_from"]
                    ):
                        return record
        return None

    # --- watching

    async def _heartbeat(self) -> None:
        last_answer = time.monotonic()
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                answer = await self._call("heartbeat", 10.0, stats=self._stats())
            except RpcError as error:
                if time.monotonic() - last_answer > COORDINATOR_SILENCE_S:
                    raise RuntimeError(f"the coordinator was silent for {COORDINATOR_SILENCE_S:g} s") from error
                continue
            last_answer = time.monotonic()
            if answer["stop"]:
                return self.stopping.set()

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
        }

    async def _watch_engine(self) -> None:
        """Start a dead vLLM again; the trainer pushes the weights when it registers again."""
        while True:
            await asyncio.sleep(0.5)
            if self.server.alive():
                continue
            self.restarts += 1
            if self.restarts > self.config.engine.max_restarts:
                raise RuntimeError(f"vLLM died {self.restarts} times; its log: {self.server.log_path}")
            log.warning("vLLM is dead, starting it again (%d)", self.restarts)
            self.starting = True
            await self._call("unregister")
            await asyncio.to_thread(self.server.stop)
            await self._start_engine()
            await self._register()

    async def _shut_down(self) -> None:
        await self.supervisor.stop()
        await asyncio.to_thread(self.server.close)
        self.control.stop()
        shutil.rmtree(self.scratch, ignore_errors=True)


def run_engine(config: Config, attempt: Attempt, node: int, snapshots: Path | None = None) -> None:
    """The engine rank's program. ``snapshots``: a directory that keeps every workspace for a later verification."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    asyncio.run(EngineRank(config, attempt, node, snapshots).run())

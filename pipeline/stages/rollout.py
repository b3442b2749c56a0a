"""Stage 1: one harness on one task in a sandbox, its calls captured, then stage 2 on what it left behind.

Whatever a harness does wrong costs at most its own rollout. An infrastructure failure is tried again, and never
scored 0.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.capture.rows import rows
from pipeline.capture.shard_process import CaptureError
from pipeline.capture.supervisor import ShardSupervisor
from pipeline.config import HarnessConfig
from pipeline.engine.server import SERVED_MODEL_NAME
from pipeline.harness.base import Endpoint, get_harness
from pipeline.records import GroupSpec, Outcome, PolicyVersion, RolloutRecord, Trace, Verdict
from pipeline.sandbox.base import Sandbox, SandboxError, SandboxExit, SandboxSpec
from pipeline.stages.verification import WorkspaceTooLarge, remove_tree, snapshot, verify
from pipeline.tasks.harbor import HarborTask, load_task, prepare_workspace

INSIDE_PORT = 8000
NO_VERSION = PolicyVersion(0, 0)


@dataclass
class Workshop:
    """What rollouts share on one node."""

    sandbox: Sandbox
    supervisor: ShardSupervisor
    harness: HarnessConfig
    scratch: Path  # node-local
    harness_home: Path
    context_tokens: int = 200_000  # that the engine takes, prompt and answer together
    counters: Counter[str] = field(default_factory=Counter)
    engine_trouble_since: Callable[[float], bool] = lambda moment: False  # monotonic clock
    snapshots: Path | None = None  # keep each workspace here, so that verification can be done again

    async def roll_out(self, spec: GroupSpec, index: int, timeout_s: float | None = None) -> RolloutRecord:
        """Rollout ``index`` of a group: tried again after infrastructure failures, at most ``harness.retries``
        times.
        """
        record, _ = await self.roll_out_traced(spec, index, timeout_s)
        return record

    async def roll_out_traced(
        self, spec: GroupSpec, index: int, timeout_s: float | None = None
    ) -> tuple[RolloutRecord, Trace]:
        """``roll_out``, with the trace of the last try."""
        task = load_task(spec.task.path)
        for _ in range(self.harness.retries + 1):
            record, trace = await self._try(spec, task, index, timeout_s or self.harness.timeout_s)
            if record.outcome is not Outcome.INFRASTRUCTURE:
                break
            self.counters[f"infrastructure: {record.verdict.reason[:80]}"] += 1
        self.counters[f"outcome: {record.outcome}"] += 1
        return record, trace

    async def _try(
        self, spec: GroupSpec, task: HarborTask, index: int, timeout_s: float
    ) -> tuple[RolloutRecord, Trace]:
        session = f"sk-yoke-{secrets.token_hex(12)}"
        started = time.monotonic()
        async with self._directory() as place:
            try:
                prepare_workspace(task, place / "workspace")
                done = await self._run_harness(spec, task, session, place, timeout_s)
                outcome, verdict = await self._judge(done, task, place, self.engine_trouble_since(started))
                self._keep_snapshot(spec, index, place)
            except (SandboxError, CaptureError, OSError) as error:
                done = _Done(Trace(session, ()), None)
                reason = f"{type(error).__name__}: {error}"
                outcome, verdict = Outcome.INFRASTRUCTURE, Verdict(None, None, 0, reason)
        return _record(spec, index, session, done, outcome, verdict, time.monotonic() - started), done.trace

    @asynccontextmanager
    async def _directory(self) -> AsyncIterator[Path]:
        place = Path(tempfile.mkdtemp(prefix="rollout-", dir=self.scratch))
        (place / "workspace").mkdir()
        try:
            yield place
        finally:
            await asyncio.to_thread(remove_tree, place)

    async def _run_harness(
        self, spec: GroupSpec, task: HarborTask, session: str, place: Path, timeout_s: float
    ) -> _Done:
        recipe = get_harness(spec.harness)
        recipe.check_installed(self.harness_home)
        endpoint = Endpoint(
            f"http://127.0.0.1:{INSIDE_PORT}",
            session,
            SERVED_MODEL_NAME,
            self.context_tokens,
            self.harness.sampling.max_tokens,
        )
        launch = recipe.launch(endpoint, task.instruction, self.harness_home)
        process = await self.sandbox.launch(
            SandboxSpec(
                argv=launch.argv,
                env=launch.env,
                workspace=place / "workspace",
                home_files=launch.home_files,
                read_only=launch.read_only,
                mounts=launch.mounts,
                stdin=launch.stdin,
                listen_port=INSIDE_PORT,
                stdout=place / "output",
                timeout_s=min(timeout_s, task.agent_timeout_s),
            )
        )
        try:
            assert process.listener is not None
            await self.supervisor.open_session(
                session, self.harness.sampling, process.listener, SERVED_MODEL_NAME, inside=process.inside
            )
            try:
                process.go()
                exit_ = await process.wait()
            finally:
                trace = await self.supervisor.close_session(session)
        except BaseException:
            process.kill()
            await process.wait()
            raise
        return _Done(trace, exit_, _tail(place / "output"))

    async def _judge(self, done: _Done, task: HarborTask, place: Path, outage: bool) -> tuple[Outcome, Verdict]:
        tool_calls = sum(call.tool_calls for call in done.trace.calls if call.delivered)
        broken = done.infrastructure_failure(outage)
        if broken:
            return Outcome.INFRASTRUCTURE, Verdict(None, None, tool_calls, broken)
        verdict = await verify(task, place / "workspace", self.sandbox, place)
        if verdict.correctness is None:
            return Outcome.INFRASTRUCTURE, Verdict(None, None, tool_calls, verdict.reason)
        outcome = done.outcome(verdict.correctness)
        return outcome, Verdict(None, _credit(outcome, verdict.correctness), tool_calls, verdict.reason)

    def _keep_snapshot(self, spec: GroupSpec, index: int, place: Path) -> None:
        if self.snapshots is not None:
            target = self.snapshots / spec.group_id / str(index)
            if target.exists():
                remove_tree(target)
            target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(WorkspaceTooLarge):
                snapshot(place / "workspace", target)


@dataclass(frozen=True)
class _Done:
    """What a harness left: its trace, how it ended, the end of what it printed."""

    trace: Trace
    exit: SandboxExit | None
    output: str = ""

    def infrastructure_failure(self, outage: bool) -> str:
        """Why this rollout must not be graded; empty when the harness itself is answerable for it."""
        assert self.exit is not None
        delivered = sum(call.delivered for call in self.trace.calls)
        if self.trace.counters.get("engine_failures", 0):
            return "the engine did not answer"
        if self.trace.counters.get("journal_failures", 0):
            return "the proxy's journal could not be written"
        if self.exit.timed_out and outage:
            return "the time ran out while the engine was down"
        if self.exit.returncode is not None and self.exit.returncode < 0:
            return f"the sandbox was killed from outside (signal {-self.exit.returncode})"
        if not delivered and not self.trace.counters.get("over_budget", 0):
            return f"the harness got no answer (exit {self.exit.returncode}): {self.output[-200:]}"
        return ""

    def outcome(self, correctness: float) -> Outcome:
        """The taxonomy's word, from the proxy's record first: exit codes lie."""
        assert self.exit is not None
        if self.exit.timed_out:
            return Outcome.AGENT_TIMEOUT
        if self.exit.killed:
            return Outcome.AGENT_CRASH
        if self.trace.counters.get("over_budget", 0):
            return Outcome.CALL_BUDGET
        return Outcome.SOLVED if correctness >= 1.0 else Outcome.UNSOLVED


def _credit(outcome: Outcome, correctness: float) -> float:
    """Whatever the workspace holds: an agent that ran out of time or broke down has failed."""
    return 0.0 if outcome in (Outcome.AGENT_TIMEOUT, Outcome.AGENT_CRASH) else correctness


def graded_again(record: RolloutRecord, verdict: Verdict) -> RolloutRecord:
    """``record`` with another verdict of the verifier on the same workspace."""
    if verdict.correctness is None:
        return replace(record, verdict=replace(verdict, tool_calls=record.verdict.tool_calls))
    correctness = _credit(record.outcome, verdict.correctness)
    outcome = record.outcome
    if outcome in (Outcome.SOLVED, Outcome.UNSOLVED):
        outcome = Outcome.SOLVED if correctness >= 1.0 else Outcome.UNSOLVED
    return replace(
        record, outcome=outcome, verdict=Verdict(None, correctness, record.verdict.tool_calls, verdict.reason)
    )


def _record(
    spec: GroupSpec, index: int, session: str, done: _Done, outcome: Outcome, verdict: Verdict, wall_s: float
) -> RolloutRecord:
    calls = done.trace.calls
    spans = [span.version for call in calls for span in call.versions]
    return RolloutRecord(
        rollout_id=session.removeprefix("sk-yoke-"),
        group_id=spec.group_id,
        index=index,
        task_id=spec.task.task_id,
        harness=spec.harness,
        outcome=outcome,
        verdict=verdict,
        rows=rows(done.trace),
        version=min(spans, default=NO_VERSION),
        newest_version=max(spans, default=NO_VERSION),
        calls=len(calls),
        malformed=sum(call.malformed for call in calls),
        undelivered=sum(not call.delivered for call in calls),
        prompt_tokens=sum(len(call.prompt_ids) for call in calls),
        sampled_tokens=sum(len(call.sampled_ids) for call in calls),
        wall_s=wall_s,
        info=_info(done),
    )


def _info(done: _Done) -> dict[str, Any]:
    info: dict[str, Any] = dict(done.trace.counters)
    info["cut"] = sum(call.finish_reason == "length" for call in done.trace.calls)
    info["forks"] = max(0, sum(call.parent is None for call in done.trace.calls) - 1)
    if done.exit is not None:
        info |= {"returncode": done.exit.returncode, "peak_memory_mb": done.exit.peak_memory_mb}
    return info


def _tail(path: Path, size: int = 2000) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace")

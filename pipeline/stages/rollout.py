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
from pipeline.config import HarnessConfig, UserError
from pipeline.engine.server import SERVED_MODEL_NAME
from pipeline.harness.base import Endpoint, HarnessLaunch, HarnessRecipe, get_harness
from pipeline.records import GroupSpec, Outcome, PolicyVersion, RolloutRecord, Trace, Verdict
from pipeline.sandbox.base import Sandbox, SandboxError, SandboxSpec
from pipeline.sandbox.builds import find_build
from pipeline.sandbox.layer import WorkspaceTooLarge, copy_layer, own_directory, remove_tree, snapshot
from pipeline.stages.outcome import SIGNALS, Decision, End, credit, decide, spoilt
from pipeline.stages.tool_calls import ToolCalls, count_tool_calls, matches
from pipeline.stages.verification import kept_layer, lay_out, verify
from pipeline.tasks.harbor import HarborTask, load_task

INSIDE_PORT = 8000
NO_VERSION = PolicyVersion(0, 0)
OF_EXIT = ("returncode", "timed_out", "killed", "peak_memory_mb", "cpu_s")


class NotInstalled(Exception):
    """A harness cannot be started: gone, at another version, or without what it needs of the machine."""


CAUSES: dict[type[Exception], str] = {  # what fails around a harness
    NotInstalled: "installation",
    SandboxError: "sandbox",
    CaptureError: "capture",
    OSError: "system",
}


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
        task = await asyncio.to_thread(load_task, spec.task.path)
        failures: list[str] = []
        causes: list[str] = []
        while True:
            record, trace = await self._try(spec, task, index, timeout_s or self.harness.timeout_s)
            tried = {"tries": len(failures) + 1, "failures": list(failures), "causes": list(causes)}
            record = replace(record, info=record.info | tried)
            if record.outcome is not Outcome.INFRASTRUCTURE:
                break
            self.counters[f"infrastructure: {record.verdict.reason[:80]}"] += 1
            failures.append(record.verdict.reason)
            causes.append(record.info["cause"])
            if len(failures) > self.harness.retries:
                break
        self.counters[f"outcome: {record.outcome}"] += 1
        if record.info.get("tool_calls_differ"):
            self.counters[f"tool calls differ from the log: {spec.harness}"] += 1
        return record, trace

    async def _try(
        self, spec: GroupSpec, task: HarborTask, index: int, timeout_s: float
    ) -> tuple[RolloutRecord, Trace]:
        session = f"sk-yoke-{secrets.token_hex(12)}"
        started = time.monotonic()
        recipe = get_harness(spec.harness)
        async with self._directory() as place:
            try:
                await asyncio.to_thread(lay_out, task, place / "workspace", self.sandbox)
                end, logged = await self._run_harness(recipe, task, session, place, timeout_s)
                end = replace(end, outage=self.engine_trouble_since(started))
                calls = count_tool_calls(end.trace, recipe, logged)
                judged = await self._judge(end, calls, task, place)
                self._keep_snapshot(spec, index, place)
            except tuple(CAUSES) as error:
                end, calls = None, ToolCalls(0, 0, 0)
                judged = _broken(error)
        wall_s = time.monotonic() - started
        trace = end.trace if end else Trace(session, ())
        return _record(spec, index, trace, judged, _info(recipe, end, calls, judged), wall_s), trace

    @asynccontextmanager
    async def _directory(self) -> AsyncIterator[Path]:
        place = Path(tempfile.mkdtemp(prefix="rollout-", dir=self.scratch))
        (place / "workspace").mkdir()
        try:
            yield place
        finally:
            await asyncio.to_thread(remove_tree, place)

    async def _run_harness(
        self, recipe: HarnessRecipe, task: HarborTask, session: str, place: Path, timeout_s: float
    ) -> tuple[End, int | None]:
        """How it ended, and how many tool calls its log has (None: it has none)."""
        endpoint = Endpoint(
            f"http://127.0.0.1:{INSIDE_PORT}",
            session,
            SERVED_MODEL_NAME,
            self.context_tokens,
            self.harness.sampling.max_tokens,
        )
        launch = self._launch(recipe, endpoint, task.instruction)
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
                image=task.image,
                directory=task.workdir or "",
                leave=place / "left",
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
        output = place / "output"
        guarded = bool(recipe.loop_guard) and await asyncio.to_thread(matches, output, recipe.loop_guard) > 0
        logged = await asyncio.to_thread(matches, output, recipe.tool_log) if recipe.tool_log else None
        return End(recipe, trace, exit_, _tail(output), guarded), logged

    def _launch(self, recipe: HarnessRecipe, endpoint: Endpoint, prompt: str) -> HarnessLaunch:
        try:
            recipe.check_installed(self.harness_home)
            return recipe.launch(endpoint, prompt, self.harness_home)
        except UserError as error:  # it was there when the run began
            raise NotInstalled(str(error)) from error

    async def _judge(self, end: End, calls: ToolCalls, task: HarborTask, place: Path) -> _Judged:
        if decision := spoilt(end):
            return _Judged(decision, Verdict(None, None, calls.counted, decision.reason))
        own_directory(place / "workspace")
        verdict = await verify(task, place / "workspace", self.sandbox, place, layer=place / "left")
        if verdict.correctness is None:
            decision = Decision(Outcome.INFRASTRUCTURE, verdict.reason, "verifier")
            return _Judged(decision, Verdict(None, None, calls.counted, verdict.reason))
        decision = decide(replace(end, correctness=verdict.correctness))
        reason = "; ".join(filter(None, (decision.reason, verdict.reason)))
        graded = Verdict(None, credit(decision.outcome, verdict.correctness), calls.counted, reason)
        return _Judged(decision, graded, decide(replace(end, correctness=0.0)).outcome)

    def _keep_snapshot(self, spec: GroupSpec, index: int, place: Path) -> None:
        if self.snapshots is not None:
            target = self.snapshots / spec.group_id / str(index)
            for old in (target, kept_layer(target)):
                if old.exists():
                    remove_tree(old)
            target.parent.mkdir(parents=True, exist_ok=True)
            own_directory(place / "workspace")
            with suppress(WorkspaceTooLarge):
                snapshot(place / "workspace", target)
                copy_layer(place / "left", kept_layer(target), find_build(load_task(spec.task.path).image))


@dataclass(frozen=True)
class _Judged:
    """A rollout's outcome and verdict, and the outcome that a workspace of no worth would have had."""

    decision: Decision
    verdict: Verdict
    unless_solved: Outcome = Outcome.INFRASTRUCTURE


def ended_by_signal(record: RolloutRecord) -> bool:
    """Whether the harness died of a signal that its sandbox outlived."""
    return record.info.get("returncode") in SIGNALS


def ended_with_the_job(record: RolloutRecord) -> RolloutRecord:
    """``record`` ungraded: some Slurms send a job's warning to every process in it, and Node cannot ignore it."""
    reason = f"the job was told to end; {record.verdict.reason}"
    verdict = Verdict(None, None, record.verdict.tool_calls, reason)
    return replace(record, outcome=Outcome.INFRASTRUCTURE, verdict=verdict, info=record.info | {"cause": "job_end"})


def _broken(error: Exception) -> _Judged:
    cause = next(cause for kind, cause in CAUSES.items() if isinstance(error, kind))
    reason = f"{type(error).__name__}: {error}"
    return _Judged(Decision(Outcome.INFRASTRUCTURE, reason, cause), Verdict(None, None, 0, reason))


def graded_again(record: RolloutRecord, verdict: Verdict) -> RolloutRecord:
    """``record`` with another verdict of the verifier on the same workspace."""
    if verdict.correctness is None:
        return replace(record, verdict=replace(verdict, tool_calls=record.verdict.tool_calls))
    otherwise = Outcome(record.info["unless_solved"])
    stopped = record.info["timed_out"] or record.info["killed"]
    outcome = Outcome.SOLVED if verdict.correctness >= 1.0 and not stopped else otherwise
    again = replace(verdict, reward=None, correctness=credit(outcome, verdict.correctness))
    return replace(record, outcome=outcome, verdict=replace(again, tool_calls=record.verdict.tool_calls))


def _record(
    spec: GroupSpec, index: int, trace: Trace, judged: _Judged, info: dict[str, Any], wall_s: float
) -> RolloutRecord:
    calls = trace.calls
    spans = [span.version for call in calls for span in call.versions]
    return RolloutRecord(
        rollout_id=trace.session_id.removeprefix("sk-yoke-"),
        group_id=spec.group_id,
        index=index,
        task_id=spec.task.task_id,
        harness=spec.harness,
        outcome=judged.decision.outcome,
        verdict=judged.verdict,
        rows=rows(trace),
        version=min(spans, default=NO_VERSION),
        newest_version=max(spans, default=NO_VERSION),
        calls=len(calls),
        malformed=sum(call.malformed for call in calls if not call.foreign),
        undelivered=sum(not call.delivered for call in calls),
        prompt_tokens=sum(len(call.prompt_ids) for call in calls),
        sampled_tokens=sum(len(call.sampled_ids) for call in calls),
        wall_s=wall_s,
        info=info,
    )


def _info(recipe: HarnessRecipe, end: End | None, calls: ToolCalls, judged: _Judged) -> dict[str, Any]:
    """What reports and a later verification need besides; all of it goes through JSON."""
    info: dict[str, Any] = {"harness_version": recipe.version, "unless_solved": judged.unless_solved.value}
    if judged.decision.cause:
        info["cause"] = judged.decision.cause
    if end is not None:
        trace, exit_ = end.trace, end.exit
        info |= trace.counters
        info["cut"] = sum(call.finish_reason == "length" for call in trace.calls)
        info["forks"] = max(0, sum(call.parent is None for call in trace.calls) - 1)
        info |= {
            name: getattr(exit_, name) for name in ("returncode", "timed_out", "killed", "peak_memory_mb", "cpu_s")
        }
    if calls.logged is not None:
        info |= {"tool_calls_logged": calls.logged, "tool_calls_differ": calls.differs}
    return info


def _tail(path: Path, size: int = 2000) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace")

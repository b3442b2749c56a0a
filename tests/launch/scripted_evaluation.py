"""`yoke evaluate` in a process of its own, with the harness scripted: what a rollout does is a function of what it is.

Real are the leases, retries, verification in a sandbox, files and fences. What spoils a rollout comes with the number
of the try, three of ten, so it hits others in every process.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from pipeline.capture.shard_process import CaptureError
from pipeline.config import Config
from pipeline.launch import engine_rank, evaluation, standalone
from pipeline.launch.evaluation import EvaluationJob
from pipeline.launch.run_directory import RunDirectory
from pipeline.records import Call, GroupSpec, PolicyVersion, RolloutRecord, TaskRef, Trace, VersionSpan
from pipeline.report.store import write_text
from pipeline.sandbox.base import SandboxError, SandboxExit
from pipeline.stages.evaluation import evaluation_specs
from pipeline.stages.outcome import End
from pipeline.stages.rollout import Workshop
from pipeline.tasks.harbor import HarborTask

HUNG = "hung"
SLOTS = 4  # rollouts at once
SPOILT = (2, 5, 9)  # of ten tries
KINDS = itertools.cycle(("sandbox", "capture", "engine"))
STARTS = 20  # after which everything must be graded: each tries a rollout four times
FOREVER_S = 600.0

what: ContextVar[tuple[GroupSpec, int]] = ContextVar("what")


class ScriptedWorkshop(Workshop):
    """``spoil``: whether tries fail. After ``hang_after`` tries (0: never) all hang; a file says when all slots do."""

    spoil, hang_after, hung, number = False, 0, Path(), itertools.count(1)

    async def _try(
        self, spec: GroupSpec, task: HarborTask, index: int, timeout_s: float
    ) -> tuple[RolloutRecord, Trace]:
        what.set((spec, index))
        return await super()._try(spec, task, index, timeout_s)

    async def _run_harness(
        self, recipe: Any, task: HarborTask, session: str, place: Path, timeout_s: float
    ) -> tuple[End, int | None]:
        number = next(self.number)
        if self.hang_after and number > self.hang_after:
            if number == self.hang_after + SLOTS:
                write_text(self.hung, "")
            await asyncio.sleep(FOREVER_S)
        spoilt = next(KINDS) if self.spoil and number % 10 in SPOILT else ""
        if spoilt == "sandbox":
            raise SandboxError("injected")
        if spoilt == "capture":
            raise CaptureError("injected")
        spec, index = what.get()
        chance = random.Random(f"{spec.group_id}/{index}")
        if chance.random() < 0.6:
            answer = (task.ref.path / "solution" / "solve.sh").read_text().split("echo ")[1].split(" >")[0]
            (place / "workspace" / "answer.txt").write_text(f"{answer}\n")
        calls = tuple(_call(n, chance) for n in range(chance.randint(1, 4)))
        late = chance.random() < 0.2
        exit_ = SandboxExit(None if late else 0, late, None, 1.0, 1.0, 1)
        return End(recipe, Trace(session, calls, counters={"engine_failures": int(spoilt == "engine")}), exit_), None


def _call(number: int, chance: random.Random) -> Call:
    ids = np.arange(3, dtype=np.int32)
    cut = chance.random() < 0.2
    return Call(
        call_id=number, parent=number - 1 if number else None, prompt_ids=ids, sampled_ids=ids,
        logprobs=np.zeros(3, np.float32), versions=(VersionSpan(PolicyVersion(1, 0), 0, 3),),
        finish_reason="length" if cut else "stop", delivered=True, trainable=True, tool_calls=number % 2,
        malformed=cut, seconds=0.0,
    )  # fmt: skip


def run(config: Config, job: EvaluationJob, order: int, spoil: bool = False, hang_after: int = 0) -> None:
    """Evaluate until every rollout is graded, with the tasks in the ``order`` of a seed."""
    run_dir = RunDirectory(Path(config.run_dir))
    ScriptedWorkshop.spoil, ScriptedWorkshop.hang_after, ScriptedWorkshop.hung = spoil, hang_after, run_dir.root / HUNG
    with scripted(order):
        for _ in range(STARTS):
            if evaluation.evaluate(config, run_dir, job).coverage().complete:
                return


class _Nothing:
    """In the place of vLLM and of the proxy's shards: whatever is asked of it is done."""

    url = "http://127.0.0.1:1"

    def __init__(self, *_: object) -> None: ...

    def nothing(self, *_: object, **__: object) -> None: ...

    start = wait_ready = warm_up = stop = close = nothing

    def alive(self) -> bool:
        return True


class _NoShards(_Nothing):
    async def nothing(self, *_: object, **__: object) -> None: ...  # type: ignore[override]

    start = stop = set_policy_version = nothing  # type: ignore[assignment]

    def stats(self) -> dict[str, Any]:
        return {}


@contextmanager
def scripted(order: int) -> Iterator[None]:
    """No engine, no proxy, no installed harness; the tasks come in another order for each number."""

    def shuffled(tasks: list[TaskRef], harnesses: list[str], size: int) -> list[GroupSpec]:
        specs = evaluation_specs(tasks, harnesses, size)
        random.Random(order).shuffle(specs)
        return specs

    replaced = (
        (evaluation, "_check_installed", lambda *_: None),
        (evaluation, "evaluation_specs", shuffled),
        (standalone, "set_version", lambda *_: None),
        (engine_rank, "EngineServer", _Nothing),
        (engine_rank, "ShardSupervisor", _NoShards),
        (engine_rank, "Workshop", ScriptedWorkshop),
        (engine_rank, "refuse_engine", lambda *_: None),
    )
    with ExitStack() as stack:
        for place, name, other in replaced:
            stack.enter_context(mock.patch.object(place, name, other))
        yield

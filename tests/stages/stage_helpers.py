"""Traces, ends and records for tests of the stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.harness.base import Action, HarnessRecipe
from pipeline.harness.packages import Npm
from pipeline.records import Call, Outcome, PolicyVersion, RolloutRecord, Trace, Verdict, VersionSpan
from pipeline.sandbox.base import SandboxExit
from pipeline.stages.outcome import End

VERSION = PolicyVersion(1, 2)


def call(number: int, parent: int | None, tools: int = 0, **changes: Any) -> Call:
    """A delivered, well-formed call whose prompt extends its parent's whole sequence (token ids: 0, 1, 2 …)."""
    before = 0 if parent is None else 3 * (parent + 1)
    prompt, sampled = np.arange(before + 2, dtype=np.int32), np.full(1, before + 2, np.int32)
    if parent is None and number:
        prompt = prompt + 1000 * number
    fields: dict[str, Any] = dict(
        call_id=number, parent=parent, prompt_ids=prompt, sampled_ids=sampled, logprobs=np.zeros(1, np.float32),
        versions=(VersionSpan(VERSION, 0, 1),), finish_reason="tool_calls" if tools else "stop", delivered=True,
        trainable=True, tool_calls=tools, malformed=False, seconds=0.1,
    )  # fmt: skip
    return Call(**(fields | changes))


def chain(*tools: int, **last: Any) -> list[Call]:
    """One conversation; ``tools`` calls in each answer. ``last`` changes the last answer."""
    calls = [call(number, number - 1 if number else None, count) for number, count in enumerate(tools)]
    return [*calls[:-1], call(len(tools) - 1, len(tools) - 2 if len(tools) > 1 else None, tools[-1], **last)]


def trace(calls: Sequence[Call], **counters: int) -> Trace:
    return Trace("sk-yoke-test", tuple(calls), "chat", counters)


def left(returncode: int | None = 0, timed_out: bool = False, killed: str | None = None) -> SandboxExit:
    return SandboxExit(returncode, timed_out, killed, wall_s=3.0, peak_memory_mb=50.0, peak_processes=4)


def recipe(**changes: Any) -> HarnessRecipe:
    fields: dict[str, Any] = dict(
        name="fake", version="1.2.3", dialect="chat", packaging=Npm("fake"), argv=("/bin/true",), env={},
        shell=Action("bash", {"command": "$command"}),
    )  # fmt: skip
    return HarnessRecipe(**(fields | changes))


def end(calls: Sequence[Call] | None = None, exit_: SandboxExit | None = None, **changes: Any) -> End:
    """A rollout that ended well unless told otherwise: one tool call, a last word, exit 0."""
    known = {"recipe": recipe(), "trace": trace(chain(1, 0) if calls is None else calls), "exit": exit_ or left()}
    return End(**(known | changes))


def record(
    outcome: Outcome = Outcome.SOLVED, correctness: float | None = 1.0, *, group: str = "g000000", index: int = 0,
    harness: str = "fake", version: PolicyVersion = VERSION, reason: str = "", **info: Any,
) -> RolloutRecord:  # fmt: skip
    if outcome is Outcome.INFRASTRUCTURE:
        correctness = None
    return RolloutRecord(
        f"{group}-{index}", group, index, "t0", harness, outcome, Verdict(None, correctness, 1, reason), (),
        version, version, 2, 0, 0, 4, 2, 1.0, info,
    )  # fmt: skip

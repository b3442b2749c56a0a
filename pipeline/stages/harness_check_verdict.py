"""What must hold after a scene of `yoke harness check`, whichever the harness, and what is only written down.

A harness may end on an empty answer or ask again: that is a fact. A trace that is not what the engine sampled, id for
id and logprob for logprob, is a failure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pipeline.engine.scripted import Sample
from pipeline.harness.base import HarnessRecipe
from pipeline.records import Call, Outcome, RolloutRecord, Trace
from pipeline.stages.harness_check_scenes import Given, Play, Scene, tag_of_prompt

Key = tuple[bytes, bytes, bytes]
OVERTIME_S = 30.0  # from the time limit to the end of everything
BAD_ANSWERS = ("malformed", "unknown tool", "empty", "cut")
FAULTS = ("429", "500", "drop")


@dataclass(frozen=True)
class Played:
    """One scene that was played, and what it left."""

    recipe: HarnessRecipe
    scene: Scene
    plays: Sequence[Play]
    record: RolloutRecord
    trace: Trace
    samples: Sequence[Sample]  # of the engine, of this and other scenes
    correctness: float | None  # of the workspace, whatever the outcome
    alive: int  # processes of the harness or its commands that are still there
    restarts: int  # of the proxy's shards
    timeout_s: float

    @cached_property
    def traced(self) -> Counter[Key]:
        """The trace's answers."""
        return Counter(_key(call.prompt_ids, call.sampled_ids, call.logprobs) for call in self.trace.calls)

    @cached_property
    def sampled(self) -> Counter[Key]:
        """What the engine sampled in this scene's conversations."""
        tags = {play.tag for play in self.plays}
        return Counter(_key(*sample) for sample in self.samples if tag_of_prompt(sample.prompt) in tags)

    @cached_property
    def aside(self) -> Counter[Key]:
        """What the engine sampled in conversations that no play is for."""
        return Counter(_key(*sample) for sample in self.samples if not tag_of_prompt(sample.prompt))

    def counter(self, name: str) -> int:
        """How often the proxy counted something."""
        return int(self.trace.counters.get(name, 0))

    def given(self, name: str) -> list[Given]:
        """The answers of a step."""
        return [given for play in self.plays for given in play.given if given.step.name == name]


def _key(prompt: Any, sampled: Any, logprobs: Any) -> Key:
    ids = (np.asarray(values, np.int32).tobytes() for values in (prompt, sampled))
    return (*ids, np.asarray(logprobs, np.float32).tobytes())  # type: ignore[return-value]


@dataclass(frozen=True)
class Must:
    """One thing that must hold: what is ``seen`` equals ``expected``, a value or a function of what was played."""

    what: str
    expected: Any
    seen: Callable[[Played], Any]

    def complaint(self, played: Played) -> str:
        """What was expected and seen; "" when it holds."""
        expected = self.expected(played) if callable(self.expected) else self.expected
        seen = self.seen(played)
        return "" if expected == seen else f"{self.what}: expected {expected}, saw {seen}"


def _trained(played: Played) -> int:
    return sum(row.trained_tokens for row in played.record.rows)


def _trainable(played: Played) -> int:
    return sum(len(call.sampled_ids) for call in played.trace.calls if call.delivered and call.trainable)


WHOLE = (
    Must("answers that the engine gave and the trace lacks", 0, lambda p: (p.sampled - p.traced).total()),
    Must("answers in the trace that the engine did not give", 0, lambda p: (p.traced - p.sampled - p.aside).total()),
    Must("undelivered answers", 0, lambda p: sum(not call.delivered for call in p.trace.calls)),
    Must("answers to something else than the harness", 0, lambda p: sum(call.foreign for call in p.trace.calls)),
    Must("trained tokens", _trainable, _trained),
    Must("drift", 0, lambda p: p.counter("drift")),
    Must("failed audits", 0, lambda p: p.counter("audit_failed")),
    Must("processes left alive", 0, lambda p: p.alive),
    Must("shards of the proxy that died", lambda p: int(p.scene.faulty), lambda p: p.restarts),
    Must(
        "its own log contradicts the trace's tool calls", False, lambda p: bool(p.record.info.get("tool_calls_differ"))
    ),
)
SOLVED = (
    Must("outcome", Outcome.SOLVED, lambda p: p.record.outcome),
    Must("correctness", 1.0, lambda p: p.correctness),
)
OF_SCENE: dict[str, tuple[Must, ...]] = {
    "calls": (
        *SOLVED,
        Must("rows", 1, lambda p: len(p.record.rows)),
        Must("calls", lambda p: len(p.plays[0].steps) + len(p.recipe.finish), lambda p: p.record.calls),
    ),
    "mistakes": SOLVED,
    "cut": (  # a harness may end with it
        Must("outcome", lambda p: Outcome.SOLVED if p.given("solve") else Outcome.UNSOLVED, lambda p: p.record.outcome),
        Must("correctness", lambda p: float(bool(p.given("solve"))), lambda p: p.correctness),
    ),
    "faults": (
        Must("correctness", 1.0, lambda p: p.correctness),
        Must("outcome, since the engine failed", Outcome.INFRASTRUCTURE, lambda p: p.record.outcome),
        Must("failures that the proxy passed on", 2, lambda p: p.counter("engine_failures")),
    ),
    "hang": (
        Must("outcome", Outcome.AGENT_TIMEOUT, lambda p: p.record.outcome),
        Must("correctness", 0.0, lambda p: p.correctness),
        Must("calls that never ended", 1, lambda p: len(p.given("hang"))),
        Must("aborted calls", 1, lambda p: p.counter("aborted")),
        Must("killed in time", True, lambda p: p.record.wall_s < p.timeout_s + OVERTIME_S),
    ),
    "subagent": (
        *SOLVED,
        Must("the sub-agent ran its command and reported", True, lambda p: len(p.plays[1].given) >= 2),
        Must("rows beside the parent's", True, lambda p: len(p.record.rows) >= 2),
    ),
    "compaction": (
        *SOLVED,
        Must("summaries", True, lambda p: len(p.given("summary")) >= 1),
        Must("a row beside that of the first history", True, lambda p: len(p.record.rows) >= 2),
    ),
}


def complaints(played: Played) -> list[str]:
    """A line for each thing that does not hold."""
    found = (must.complaint(played) for must in (*WHOLE, *OF_SCENE[played.scene.name]))
    return [line for line in found if line]


# --- facts


def facts(played: Played) -> dict[str, Any]:
    """What was seen, for the table; all of it goes through JSON."""
    record, info = played.record, played.record.info
    figures: dict[str, Any] = {
        "outcome": str(record.outcome),
        "calls": record.calls,
        "rows": len(record.rows),
        "drift": played.counter("drift"),
        "side_calls": sum(tag_of_prompt(call.prompt_ids.tolist()) == "" for call in played.trace.calls),
        "prompt_tokens": len(played.trace.calls[0].prompt_ids) if played.trace.calls else 0,
        "sampled_tokens": record.sampled_tokens,
        "untrainable": sum(not call.trainable for call in played.trace.calls),
        "trained_tokens": _trained(played),
        "tool_calls": record.verdict.tool_calls,
        "tool_calls_logged": info.get("tool_calls_logged"),
        "returncode": info.get("returncode"),
        "wall_s": round(record.wall_s, 1),
        "cpu_s": info.get("cpu_s"),
        "memory_mb": info.get("peak_memory_mb"),
    }
    fates = {name: _fate(played, given) for name in BAD_ANSWERS for given in played.given(name)[:1]}
    gaps = {name: _gap(played, given) for name in FAULTS for given in played.given(name)[:1]}
    return figures | ({"fates": fates} if fates else {}) | ({"retried_after_s": gaps} if gaps else {})


def _fate(played: Played, given: Given) -> str:
    """What the harness did with a bad answer."""
    calls = played.trace.calls
    same = (call for call in calls if call.sampled_ids.tolist() == given.ids)
    bad = next((call for call in same if call.prompt_ids.tolist() == given.prompt), None)
    if bad is None:
        return "never got it"
    later = calls[bad.call_id + 1 :]
    if not later:
        return "ends"
    if later[0].parent == bad.call_id:
        return "goes on"
    return "asks again" if _same_prompt(later[0], bad) else "drops it"


def _same_prompt(one: Call, other: Call) -> bool:
    return bool(np.array_equal(one.prompt_ids, other.prompt_ids))


def _gap(played: Played, given: Given) -> float | None:
    """Seconds until it asked again; None if it never did."""
    later = [other.at for other in played.plays[0].given if other.at > given.at]
    return round(min(later) - given.at, 1) if later else None

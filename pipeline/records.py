"""The records that pass between rooms, and their Arrow schemas.

Rooms share these and import nothing else of each other.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa


@dataclass(frozen=True, order=True)
class PolicyVersion:
    """One set of weights: ``n`` grows by one at each weight sync; ``attempt`` keeps a restarted run from reusing a
    number.
    """

    attempt: int
    n: int

    def __str__(self) -> str:
        return f"{self.attempt}.{self.n}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Read ``"attempt.n"``. Raises ValueError on anything else."""
        attempt, n = text.split(".")
        return cls(int(attempt), int(n))


@dataclass(frozen=True)
class TaskRef:
    """A Harbor task directory, by id and place."""

    task_id: str
    path: Path


@dataclass(frozen=True)
class GroupSpec:
    """``size`` rollouts of one (task, harness, pass): the unit of scheduling, admission, advantage and resume."""

    group_id: str
    task: TaskRef
    harness: str
    pass_index: int
    size: int


@dataclass(frozen=True)
class VersionSpan:
    """Sampled tokens ``start:end`` of one call came from ``version``."""

    version: PolicyVersion
    start: int
    end: int


@dataclass(frozen=True)
class Inside:
    """A way to look into a sandbox: open descriptors of its /proc, and of a socket of its network that tells about the
    others there (sock_diag(7)).
    """

    proc: int
    sockets: int


@dataclass(frozen=True)
class Call:
    """One model request and its answer, as the engine saw it.

    ``prompt_ids`` int32 [P]; ``sampled_ids`` int32 [S], the end token included; ``logprobs`` float32 [S], of the
    sampled
    tokens under the distribution that was sampled from. ``parent`` is the call whose prompt + sampled ids are the
    longest
    such prefix of this prompt, or None for a root.
    """

    call_id: int
    parent: int | None
    prompt_ids: np.ndarray
    sampled_ids: np.ndarray
    logprobs: np.ndarray
    versions: tuple[VersionSpan, ...]
    finish_reason: str
    delivered: bool
    trainable: bool
    tool_calls: int
    malformed: bool
    seconds: float
    foreign: bool = False  # not the harness asked, but something that its agent started

    @property
    def version(self) -> PolicyVersion:
        """The oldest policy version that sampled a token of this call."""
        return min(span.version for span in self.versions)


@dataclass(frozen=True)
class Trace:
    """The tree of one rollout's calls, in the order of their answers; a parent stands before its children.

    ``transcript`` is empty unless the upstream gave text instead of token ids; then it holds, call by call,
    ``{"messages", "tools", "answer"}`` in Chat Completions form.
    """

    session_id: str
    calls: tuple[Call, ...]
    dialect: str = ""
    counters: dict[str, int] = field(default_factory=dict)
    transcript: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Row:
    """One root-to-leaf path. ``input_ids`` int32 [L], ``loss_mask`` bool [L] (True = train this token), ``logprobs``
    float32 [L]
    (behaviour logprob where the token was sampled, 0 elsewhere)."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray

    @property
    def trained_tokens(self) -> int:
        return int(self.loss_mask.sum())


class Outcome(enum.StrEnum):
    """How a rollout ended (docs/outcomes.md). Only INFRASTRUCTURE is never scored."""

    SOLVED = "solved"
    UNSOLVED = "unsolved"
    AGENT_TIMEOUT = "agent_timeout"
    AGENT_CRASH = "agent_crash"
    CALL_BUDGET = "call_budget"
    LOOP_GUARD = "loop_guard"
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True)
class Verdict:
    """What the verifier said. ``reward`` None: ungraded, because the infrastructure failed (never 0 for that)."""

    reward: float | None
    correctness: float | None
    tool_calls: int
    reason: str = ""


@dataclass(frozen=True)
class RolloutRecord:
    """One finished rollout: its rows, its verdict and the figures that reports need."""

    rollout_id: str
    group_id: str
    index: int
    task_id: str
    harness: str
    outcome: Outcome
    verdict: Verdict
    rows: tuple[Row, ...]
    version: PolicyVersion
    newest_version: PolicyVersion
    calls: int
    malformed: int
    undelivered: int
    prompt_tokens: int
    sampled_tokens: int
    wall_s: float
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainGroup:
    """A closed group as the trainer takes it: graded rollouts with their advantages (same length, same order)."""

    group_id: str
    harness: str
    rollouts: tuple[RolloutRecord, ...]
    advantages: tuple[float, ...]


ROLLOUT_SCHEMA = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("group_id", pa.string()),
        ("index", pa.int32()),
        ("task_id", pa.string()),
        ("harness", pa.string()),
        ("outcome", pa.string()),
        ("reward", pa.float64()),
        ("correctness", pa.float64()),
        ("tool_calls", pa.int32()),
        ("reason", pa.string()),
        ("version", pa.string()),
        ("newest_version", pa.string()),
        ("calls", pa.int32()),
        ("malformed", pa.int32()),
        ("undelivered", pa.int32()),
        ("prompt_tokens", pa.int64()),
        ("sampled_tokens", pa.int64()),
        ("wall_s", pa.float64()),
        ("info", pa.string()),
        (
            "rows",
            pa.list_(
                pa.struct(
                    [
                        ("input_ids", pa.list_(pa.int32())),
                        ("loss_mask", pa.list_(pa.bool_())),
                        ("logprobs", pa.list_(pa.float32())),
                    ]
                )
            ),
        ),
    ]
)


NO_CHECKPOINT = (0, 0)
_CHECKPOINT = re.compile(r"(?:(\d+)-)?(\d+)-update-\d+")


def checkpoint_order(name: str) -> tuple[int, int]:
    """(attempt, sequence) of a checkpoint directory's name; NO_CHECKPOINT when it is none's."""
    match = _CHECKPOINT.fullmatch(name)
    return (int(match[1] or 0), int(match[2])) if match else NO_CHECKPOINT

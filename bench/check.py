"""The exact check of traces: every prompt id, sampled id and logprob against what the deterministic tokens must be.

A prompt is compared twice: as the target's trace tells it, and as the engine was sent it (by a digest from the engine).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from bench.contract import ReadCall, ReadRow
from bench.filler import TOOL_NAMES, Passage
from bench.tokens import (
    CALL_SIZE,
    CLOSE,
    CLOSE_LOGPROB,
    ID_PIECES,
    LOGPROBS,
    OPEN,
    ROLES,
    START,
    Span,
    answer_arguments,
    call_text,
    message_text,
    sampled_span,
    text_span,
)


class Said(NamedTuple):
    """One message of a conversation as the client knows it: a passage, or a sampled answer."""

    role: str
    passage: Passage | None = None
    seed: int = 0
    size: int = 0

    @property
    def span(self) -> Span:
        return self.passage.span if self.passage is not None else sampled_span(self.seed, self.size)


@dataclass
class Turn:
    """One answer that a client took; ``before``: how many messages its prompt holds."""

    seed: int
    size: int
    before: int


def verbatim(said: Said) -> bytes:
    """A message with the ids of its text, or those it was sampled with."""
    return message_text(said.role, [ID_PIECES.cut(said.span)])


def json_result(said: Said) -> bytes:
    """A tool result shown as the JSON object that Gemini wraps it in, as Python writes it."""
    if said.role != "tool" or said.passage is None:
        return verbatim(said)
    text = json.dumps({"output": said.passage.text.decode()})
    return message_text("tool", [ID_PIECES.cut(text_span(text.encode()))])


def split_answer(said: Said) -> bytes:
    """Text and call of an answer as two messages."""
    if said.role != "assistant":
        return verbatim(said)
    text = message_text(said.role, [ID_PIECES.cut(said.span.first(said.size - CALL_SIZE))])
    return text + b"," + message_text("assistant", [call_text(TOOL_NAMES[0], answer_arguments(said.seed))])


RENDERINGS: dict[str, Callable[[Said], bytes]] = {
    "verbatim": verbatim,
    "tool result as JSON": json_result,
    "text and call in two messages": split_answer,
}
"""The ways in which a proxy may rightly show a conversation to the engine; one of them must fit a whole session."""


class Prompts(NamedTuple):
    """The prompts of a session: each is the first so many ids of ``ids``; ``digests``: of each as JSON text."""

    ids: NDArray[np.int32]
    lengths: list[int]
    digests: list[str]


def prompts(script: Sequence[Said], turns: Sequence[Turn], show: Callable[[Said], bytes]) -> Prompts:
    """All prompts of a session, shown in one way."""
    asked = {turn.before for turn in turns}
    hasher = xxhash.xxh3_64()
    pieces = [b"%d,%d" % (START, len(TOOL_NAMES))]
    hasher.update(pieces[0])
    length, lengths, digests = 2, [], []
    for position, said in enumerate(script):
        if position in asked:
            ask = hasher.copy()
            ask.update(b",%d,%d" % (OPEN, ROLES["assistant"]))
            lengths.append(length + 2)
            digests.append(ask.hexdigest())
        pieces.append(show(said))
        length += pieces[-1].count(b",") + 1
        hasher.update(b"," + pieces[-1])
    return Prompts(np.fromstring(b",".join(pieces).decode(), dtype=np.int32, sep=","), lengths, digests)


@dataclass
class Verdict:
    """What the checks found; every number but the first six must be 0."""

    sessions: int = 0
    right_sessions: int = 0
    ids_checked: int = 0
    rows: int = 0
    last_unnoted: int = 0  # last answers that a client got and a killed shard had no time to note: nobody could tell
    continuity_breaks: int = 0  # prompts that do not extend the call before id by id: text-in proxies have them
    missing_calls: int = 0
    extra_calls: int = 0
    wrong_prompts: int = 0
    wrong_engine_prompts: int = 0
    wrong_sampled: int = 0
    wrong_logprobs: int = 0
    wrong_delivered: int = 0
    wrong_rows: int = 0
    unreadable: int = 0
    renderings: Counter[str] = field(default_factory=Counter)
    read_errors: Counter[str] = field(default_factory=Counter)

    @property
    def wrong(self) -> int:
        """How many things are wrong."""
        return (
            self.missing_calls + self.extra_calls + self.wrong_prompts + self.wrong_engine_prompts
            + self.wrong_sampled + self.wrong_logprobs + self.wrong_delivered + self.wrong_rows + self.unreadable
        )  # fmt: skip


class Checker:
    """Compares sessions. ``retried``: clients ask again, so a call may be there that no client got."""

    def __init__(self, engine_prompts: dict[int, str], retried: bool) -> None:
        self.verdict = Verdict()
        self._engine_prompts, self._retried = engine_prompts, retried

    def check(self, dialect: str, script: Sequence[Said], turns: Sequence[Turn], calls: Sequence[ReadCall]) -> None:
        """Compare one session's trace with what its client knows."""
        verdict = self.verdict
        before = verdict.wrong
        verdict.sessions += 1
        paired = self._paired(turns, calls)
        name, known = self._fitting(script, turns, paired)
        verdict.renderings[f"{dialect}: {name}"] += 1
        previous: NDArray[np.int32] | None = None
        for turn, call, length, digest in zip(turns, paired, known.lengths, known.digests, strict=True):
            self.check_engine_prompt(turn, digest)
            if call is None:
                continue
            self._compare(turn, call, known.ids[:length])
            if previous is not None and not np.array_equal(call.prompt_ids[: len(previous)], previous):
                verdict.continuity_breaks += 1
            previous = np.concatenate((call.prompt_ids, call.sampled_ids))
        verdict.right_sessions += verdict.wrong == before

    def check_rows(self, calls: Sequence[ReadCall], rows: Sequence[ReadRow]) -> None:
        """Each row is a call's prompt and answer, and all delivered ids are supervised, each in one row."""
        self.verdict.rows += len(rows)
        sequences = {call.prompt_ids.tobytes() + call.sampled_ids.tobytes() for call in calls}
        self.verdict.wrong_rows += sum(row.input_ids.tobytes() not in sequences for row in rows)
        delivered = sum(len(call.sampled_ids) for call in calls if call.delivered)
        self.verdict.wrong_rows += sum(row.supervised for row in rows) != delivered

    def check_engine_prompt(self, turn: Turn, digest: str) -> None:
        """Compare what the engine was sent."""
        self.verdict.wrong_engine_prompts += self._engine_prompts.get(turn.seed) != digest

    def unreadable(self, error: Exception) -> None:
        """A trace could not be read."""
        self.verdict.unreadable += 1
        self.verdict.read_errors[repr(error)[:120]] += 1

    def _paired(self, turns: Sequence[Turn], calls: Sequence[ReadCall]) -> list[ReadCall | None]:
        """The call of each turn, by its sampled ids where there may be others. Counts what is amiss."""
        verdict = self.verdict
        if not self._retried:
            verdict.missing_calls += max(0, len(turns) - len(calls))
            verdict.extra_calls += max(0, len(calls) - len(turns))
            verdict.wrong_delivered += sum(not call.delivered for call in calls)
            return [*calls[: len(turns)], *[None] * (len(turns) - len(calls))]
        by_ids = {call.sampled_ids.tobytes(): call for call in calls}
        paired = [by_ids.get(_sampled(turn).tobytes()) for turn in turns]
        taken = {id(call) for call in paired}
        verdict.missing_calls += sum(call is None for call in paired)
        unnoted = [call is not None and not call.delivered for call in paired]
        verdict.wrong_delivered += sum(unnoted[:-1])  # an answer that comes back in the next request was delivered
        verdict.last_unnoted += sum(unnoted[-1:])
        verdict.extra_calls += sum(call.delivered and id(call) not in taken for call in calls)
        return paired

    @staticmethod
    def _fitting(
        script: Sequence[Said], turns: Sequence[Turn], paired: Sequence[ReadCall | None]
    ) -> tuple[str, Prompts]:
        """The rendering that fits the longest prompt, else the first."""
        last = next((call for call in reversed(paired) if call is not None), None)
        first: Prompts | None = None
        for name, show in RENDERINGS.items():
            known = prompts(script, turns, show)
            first = first or known
            if last is not None and np.array_equal(last.prompt_ids, known.ids[: len(last.prompt_ids)]):
                return name, known
        assert first is not None
        return "none", first

    def _compare(self, turn: Turn, call: ReadCall, prompt: NDArray[np.int32]) -> None:
        verdict = self.verdict
        logprobs = np.append(LOGPROBS[_slice(turn)], np.float32(CLOSE_LOGPROB))
        verdict.wrong_prompts += not np.array_equal(call.prompt_ids, prompt)
        verdict.wrong_sampled += not np.array_equal(call.sampled_ids, _sampled(turn))
        verdict.wrong_logprobs += not np.array_equal(call.logprobs, logprobs)
        verdict.ids_checked += len(prompt) + len(logprobs)


def _slice(turn: Turn) -> slice:
    span = sampled_span(turn.seed, turn.size)
    return slice(span.offset, span.offset + span.size)


def _sampled(turn: Turn) -> NDArray[np.int32]:
    return np.append(sampled_span(turn.seed, turn.size).ids, np.int32(CLOSE))

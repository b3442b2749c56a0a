"""The one-turn pipeline: a canonical request in, a recorded call out. Dialects and HTTP are left to others.

``Turns`` is what every upstream shares, ``EngineTurns`` the pipeline over token ids; ``capture.text`` is the other one.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec

from pipeline.capture.dialects.base import Answer, ApiError, ChatRequest, Fault, ToolCall
from pipeline.capture.ids import WIDTH, pack, pack_floats
from pipeline.capture.journal import Answered, Counted, Delivered, Journal, Node
from pipeline.capture.session import Session
from pipeline.capture.upstream import RETRY_AFTER_S, Called, Engine, Message, Rendered, Sampled

WEIGHTS_POLL_S = 0.5
SAMPLES = 3  # tries of one call, when a weight sync or the engine spoils a sample
ENGINE_FAULTS = (Fault.UNAVAILABLE, Fault.INTERNAL)
CALL_MARKERS = (
    "<tool_call>",
    "<|tool_call_start|>",
    "<function=",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<|tool_call_begin|>",
)


@dataclass(frozen=True)
class Figures:
    """Why an answer ended (the upstream's word), and its true token counts."""

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Turns(ABC):
    """Answers requests for any session of a shard. ``version`` ("attempt.n") salts the prefix cache of new samples."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.version = "0.0"
        self.totals: Counter[str] = Counter()

    async def answer(self, session: Session, dialect: str, request: ChatRequest) -> Node:
        """The call that answers a request, journalled, not yet delivered. Raises ApiError; cancelling aborts it."""
        try:
            return await self._answer(session, dialect, request)
        except ApiError as error:
            if error.fault in ENGINE_FAULTS:
                self.count(session, "engine_failures")
            raise

    @abstractmethod
    async def prompt_tokens(self, request: ChatRequest) -> int:
        """How many tokens a request's prompt has. Raises ApiError."""

    @abstractmethod
    async def _answer(self, session: Session, dialect: str, request: ChatRequest) -> Node:
        """See ``answer``."""

    def delivered(self, session: Session, node: Node) -> None:
        """The harness got this answer."""
        if not node.delivered:
            node.delivered = True
            self.journal.append(Delivered(session.id, node.call_id))

    def count(self, session: Session, counter: str) -> None:
        """Count something rare, so that it survives the shard."""
        session.counters[counter] += 1
        self.totals[counter] += 1
        self.journal.append(Counted(session.id, counter))

    @contextmanager
    def _spending(self, session: Session) -> Iterator[None]:
        """One call of the budget for what is done inside; given back when the upstream fails."""
        self._reserve(session)
        try:
            yield
        except asyncio.CancelledError:
            self.count(session, "aborted")
            raise
        except ApiError:
            session.release()
            raise

    def _reserve(self, session: Session) -> None:
        try:
            session.reserve()
        except ApiError:
            self.count(session, "over_budget")
            raise

    def _keep(self, session: Session, node: Node) -> Node:
        """Put a new call into the journal and the session."""
        self.journal.append(Answered(session.id, node))
        session.add(node)
        self.totals["calls"] += 1
        return node


class EngineTurns(Turns):
    """Token-in, token-out."""

    def __init__(self, engine: Engine, journal: Journal) -> None:
        super().__init__(journal)
        self.engine = engine

    async def prompt_tokens(self, request: ChatRequest) -> int:
        return len((await self.engine.render(request)).token_ids)

    async def _answer(self, session: Session, dialect: str, request: ChatRequest) -> Node:
        started = time.monotonic()
        rendered = await self.engine.render(request)
        prompt = pack(rendered.token_ids)
        if known := session.tree.undelivered(prompt, request.constraint):
            self.count(session, "redelivered")
            return known
        max_tokens = await self._room(session, request, len(rendered.token_ids))
        with self._spending(session):
            sampled = await self._sample(session, rendered, max_tokens)
            message = await self.engine.derender(request, rendered, sampled)
        return self._record(session, dialect, request, prompt, sampled, message, time.monotonic() - started)

    async def _room(self, session: Session, request: ChatRequest, prompt_tokens: int) -> int:
        """Tokens that may be sampled. Raises ApiError(CONTEXT) when the prompt fills the window."""
        window = await self.engine.context_length()
        room = window - prompt_tokens
        if room < 1:
            self.count(session, "context_full")
            message = (
                f"This model's maximum context length is {window} tokens. However, your messages resulted in "
                f"{prompt_tokens} tokens. Please reduce the length of the messages."
            )
            raise ApiError(Fault.CONTEXT, message)
        return min(room, session.policy.max_tokens, request.max_tokens or room)

    async def _sample(self, session: Session, rendered: Rendered, max_tokens: int) -> Sampled:
        """One sample of which no token read key/value blocks of weights older than the salt says.

        When a sync lands between a call's submission and its start, the call may reuse blocks of the old weights under
        the new ones; it is then sampled again with the new salt.
        """
        spoilt, give_up = 0, time.monotonic() + self.engine.outage_s
        while spoilt < SAMPLES:
            salt = self.version
            sampled = await self.engine.generate(rendered, session.policy.temperature, max_tokens, salt)
            if sampled.finish_reason == "abort":
                self.count(session, "engine_aborts")
                spoilt += 1
                continue
            spans = _known_versions(sampled, salt)
            if spans is None:
                await self._await_weights(session, give_up)
                continue
            if _order(spans[0][0]) <= _order(salt):
                return replace(sampled, versions=spans)
            self.version = max(self.version, spans[0][0], key=_order)
            self.count(session, "resampled")
            spoilt += 1
        raise ApiError(Fault.UNAVAILABLE, f"the engine spoilt {SAMPLES} samples in a row", RETRY_AFTER_S)

    async def _await_weights(self, session: Session, give_up: float) -> None:
        """An engine that was started again serves the weights on disk until it is given the policy's: not an answer."""
        self.count(session, "unversioned")
        if time.monotonic() > give_up:
            message = f"the engine has had no policy weights for {self.engine.outage_s:.0f} s"
            raise ApiError(Fault.UNAVAILABLE, message, RETRY_AFTER_S)
        await asyncio.sleep(WEIGHTS_POLL_S)

    def _record(
        self,
        session: Session,
        dialect: str,
        request: ChatRequest,
        prompt: bytes,
        sampled: Sampled,
        message: Message,
        seconds: float,
    ) -> Node:
        """Put the call into the tree and the journal."""
        parent = session.tree.parent(prompt)
        base, keep = session.tree.base(prompt, parent)
        call_id = len(session.tree.nodes)
        length = len(prompt) // WIDTH
        figures = Figures(sampled.finish_reason, length, len(sampled.ids), sampled.cached_tokens)
        node = Node(
            call_id=call_id,
            parent=parent,
            base=base,
            keep=keep,
            suffix=prompt[keep * WIDTH :],
            sampled=pack(sampled.ids),
            logprobs=pack_floats(sampled.logprobs),
            versions=sampled.versions,
            answer=canonical_answer(session, call_id, request, message, figures),
            constraint=request.constraint,
            dialect=dialect,
            trainable=not request.forced,
            malformed=is_malformed(request, message),
            seconds=seconds,
        )
        return self._keep(session, node)


def _order(version: str) -> tuple[int, int]:
    """ "attempt.n" as numbers. Raises ValueError for another form."""
    attempt, n = version.split(".")
    return int(attempt), int(n)


def _known_versions(sampled: Sampled, current: str) -> list[tuple[str, int, int]] | None:
    """The engine's spans (``current`` if it tells none), or None when a name in them is no policy version."""
    spans = sampled.versions or [(current, 0, len(sampled.ids))]
    try:
        for version, _, _ in spans:
            _order(version)
    except ValueError:
        return None
    return spans


def canonical_answer(
    session: Session, call_id: int, request: ChatRequest, message: Message, figures: Figures
) -> Answer:
    """The canonical answer. Tool-call ids are ours, unique in the session: a replayed history is recognised by them."""
    calls = _kept_calls(request, message)
    stop = "length" if figures.finish_reason == "length" else "stop"
    return Answer(
        id=f"{session.suffix}-{call_id}",
        text=message.content or "",
        reasoning=message.reasoning or "",
        tool_calls=tuple(
            ToolCall(session.next_tool_id(), call.function.name, call.function.arguments) for call in calls
        ),
        finish_reason="tool_calls" if calls else stop,
        prompt_tokens=figures.prompt_tokens,
        completion_tokens=figures.completion_tokens,
        cached_tokens=figures.cached_tokens,
        created=int(time.time()),
    )


def _kept_calls(request: ChatRequest, message: Message) -> list[Called]:
    calls = message.tool_calls or []
    return calls if request.parallel_tool_calls else calls[:1]


def is_malformed(request: ChatRequest, message: Message) -> bool:
    """A call was opened that the engine's parser did not take, or its arguments are no JSON object."""
    if request.tool_choice == "none":
        return False
    if any(marker in (message.content or "") for marker in CALL_MARKERS):
        return True
    return not all(_is_object(call.function.arguments) for call in message.tool_calls or ())


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except msgspec.DecodeError:
        return False

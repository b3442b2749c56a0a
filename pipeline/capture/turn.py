"""The one-turn pipeline: a canonical request in, a recorded call out. Dialects and HTTP are left to others.

``Turns`` is what every upstream shares, ``EngineTurns`` the pipeline over token ids; ``capture.text`` is the other one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec

from pipeline.capture import ids
from pipeline.capture.continuity import THOUGHT_END, NoBridge, SelfTest, Template, joined, renderable, suffix
from pipeline.capture.dialects.base import Answer, ApiError, ChatRequest, Fault, ToolCall
from pipeline.capture.journal import Answered, Counted, Delivered, Journal, Node
from pipeline.capture.matcher import Match
from pipeline.capture.session import Session
from pipeline.capture.upstream import (
    RETRY_AFTER_S,
    Engine,
    EngineError,
    Frame,
    Message,
    Rendered,
    Sampled,
)

AUDITED = 0.01  # of the bridged prompts are compared with the whole history rendered
ADDED_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # bounds of the histogram of added latency
WEIGHTS_POLL_S = 0.5
WARM_RETRY_S = 1.0
SAMPLES = 3  # tries of one call, when a weight sync or the engine spoils a sample
CALL_MARKERS = (
    "<tool_call>",
    "<|tool_call_start|>",
    "<function=",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<|tool_call_begin|>",
)

log = logging.getLogger(__name__)


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
        self.draining = False  # the proxy is about to end: no new turn is taken

    async def answer(self, session: Session, request: ChatRequest) -> Node:
        """The call that answers a request, journalled, not yet delivered. Raises ApiError; cancelling aborts it."""
        for name in request.dropped:
            self.totals[f"dropped_{name}"] += 1
        try:
            return await self._answer(session, request)
        except EngineError:
            if not request.foreign:  # else an agent could see to it that its rollout is not graded
                self.count(session, "engine_failures")
            raise

    @abstractmethod
    async def warm(self) -> None:
        """Learn what can be learnt from the upstream before the first request."""

    @abstractmethod
    async def prompt_tokens(self, session: Session, request: ChatRequest) -> int:
        """How many tokens a request's prompt has. Raises ApiError."""

    @abstractmethod
    async def _answer(self, session: Session, request: ChatRequest) -> Node:
        """See ``answer``."""

    def match(self, session: Session, request: ChatRequest) -> Match:
        """Where a request stands in the session's tree. An answer that the harness sends back was delivered."""
        tools = request.tools.digest if request.tools else b""
        match = session.matcher.walk(tools, request.atoms)
        if match.rewritten:
            self.count(session, "arguments_rewritten")
        if match.parent is not None and not request.foreign:
            self.delivered(session, session.tree.nodes[match.parent])
        return match

    def added(self, seconds: float) -> None:
        """Count the time that a turn took beside waiting for the upstream."""
        bound = next((bound for bound in ADDED_MS if seconds * 1000 <= bound), "more")
        self.totals[f"added_ms_{bound}"] += 1
        self.totals["added_us"] += int(seconds * 1e6)

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
        if counter := node.origin.counter:
            self.totals[counter] += 1
        return node


@dataclass(frozen=True)
class Prompt:
    """Ids to sample after, and where they stand in the tree: parent, and what they are stored against."""

    text: bytes
    frame: Frame
    parent: int | None
    base: int | None
    keep: int
    count: int  # ids in the text
    bridged: bool = False
    follow: bytes = b""  # of a bridged one: the ids after the parent's turn

    @property
    def suffix(self) -> bytes:
        """The ids beyond the first ``keep`` bytes."""
        return self.text[self.keep + 1 :] if self.keep else self.text


class EngineTurns(Turns):
    """Token-in, token-out.

    ``named_weights``: the engine must name its weights by policy versions; a name that is none means that it serves
    weights from disk and is waited for. Otherwise (an engine that is not ours) such weights count as the present ones.
    """

    def __init__(self, engine: Engine, journal: Journal, named_weights: bool = True) -> None:
        super().__init__(journal)
        self.engine = engine
        self._named_weights = named_weights
        self._templates: dict[bool | None, Template] = {}
        self._learning = asyncio.Lock()
        self._audits: set[asyncio.Task[None]] = set()

    async def warm(self) -> None:
        while None not in self._templates:
            try:
                await self.template(None)
            except ApiError as error:
                log.info("the self-test waits for the engine: %s", error)
                await asyncio.sleep(WARM_RETRY_S)

    async def template(self, thinking: bool | None) -> Template:
        """What is known of the engine's chat template; the first caller pays for the self-test. Raises ApiError."""
        async with self._learning:
            if thinking not in self._templates:
                found = await SelfTest(self.engine, thinking).run()
                self._templates[thinking] = found
                level = logging.ERROR if found.problem else logging.INFO
                log.log(level, "chat template: %s", found.report())
            return self._templates[thinking]

    async def prompt_tokens(self, session: Session, request: ChatRequest) -> int:
        template = await self.template(session.policy.thinking)
        return ids.count((await self._render(session, request, template)).text)

    async def _answer(self, session: Session, request: ChatRequest) -> Node:
        began = time.monotonic()
        template = self._templates.get(session.policy.thinking) or await self.template(session.policy.thinking)
        match = self.match(session, request)
        if known := session.undelivered(match.chain, request.constraint, request.foreign):
            self.count(session, "redelivered")
            return known
        engine_s = -time.monotonic()
        prompt = await self._prompt(session, request, match, template)
        max_tokens = await self._room(session, request, prompt.count)
        with self._spending(session):
            sampled = await self._sample(session, prompt, max_tokens)
            fields = self.engine.fields(_tools(request), session.policy.thinking, request.tool_choice)
            message = await self.engine.derender(prompt.text, prompt.count, prompt.frame, sampled, fields)
        engine_s += time.monotonic()
        node = self._record(session, request, match, prompt, sampled, message, template)
        node.seconds = time.monotonic() - began
        self._keep(session, node)
        self.added(node.seconds - engine_s)
        if prompt.bridged and random.random() < AUDITED:
            self._audit(session, request, template, prompt)
        return node

    # --- the prompt

    async def _prompt(self, session: Session, request: ChatRequest, match: Match, template: Template) -> Prompt:
        """The ids to sample after: an earlier call's own where the history allows it, else rendered anew."""
        if same := session.matcher.asked(match.chain):
            return await self._again(session, request, same[0], template)
        cause = self._obstacle(session, request, match, template)
        if not cause:
            try:
                return await self._bridge(session, request, match, template)
            except NoBridge as error:
                cause = str(error)
        return await self._anew(session, request, match, template, cause)

    async def _again(self, session: Session, request: ChatRequest, call_id: int, template: Template) -> Prompt:
        """A retry: a sibling of the call that had the same prompt."""
        key = _frame_key(request)
        if key not in session.frames:
            session.frames[key] = (await self._render(session, request, template)).frame
        text, known = session.tree.prompt(call_id), session.tree.nodes[call_id]
        return Prompt(text, session.frames[key], known.parent, call_id, len(text), known.answer.prompt_tokens)

    def _obstacle(self, session: Session, request: ChatRequest, match: Match, template: Template) -> str:
        """Why the call's own ids may not be used; "" when nothing is in the way."""
        if match.parent is None:
            return "root"
        if not session.policy.continuity or template.problem:
            return "text_in"
        if match.after == len(request.items):
            return "nothing_new"
        if session.policy.thoughts == "fork" and self._loses_thoughts(session, request, match, template):
            return "thoughts"
        return ""

    def _loses_thoughts(self, session: Session, request: ChatRequest, match: Match, template: Template) -> bool:
        """Whether the template would strip thoughts that still stand in the parent's ids."""
        new = {atom.role for atoms in request.atoms[match.after :] for atom in atoms}
        roles = {"user" if role == "system" else role for role in new}
        if not roles.intersection(template.strips_after):
            return False
        current = match.parent
        while current is not None:
            node = session.tree.nodes[current]
            if node.answer.reasoning.strip() or THOUGHT_END in node.answer.text:
                return True
            current = node.parent
        return False

    async def _bridge(self, session: Session, request: ChatRequest, match: Match, template: Template) -> Prompt:
        """The parent's ids and a suffix for what is new. Raises NoBridge."""
        assert match.parent is not None
        parent = session.tree.nodes[match.parent]
        known = session.frames.get(_frame_key(request))
        tools = _tools(request) if template.with_tools or known is None else None
        fields = self._fields(session, request, tools)
        follow, frame = await suffix(self.engine, template, parent.answer, request.messages(match.after), fields)
        session.frames.setdefault(_frame_key(request), frame)
        before = session.tree.sequence(match.parent)
        text, whole = joined(before, parent.ended, follow)
        if not whole:
            self.count(session, "fork_turn_end")
        keep = len(before) if whole else len(ids.without_last(before))
        count = parent.answer.prompt_tokens + parent.answer.completion_tokens + ids.count(follow) - parent.ended
        return Prompt(text, known or frame, match.parent if whole else None, match.parent, keep, count, True, follow)

    async def _anew(
        self, session: Session, request: ChatRequest, match: Match, template: Template, cause: str
    ) -> Prompt:
        """The whole history rendered; counted as a fork where it does not extend the call it continues."""
        rendered = await self._render(session, request, template)
        session.frames[_frame_key(request)] = rendered.frame
        parent = session.tree.parent(rendered.text)
        if session.tree.nodes and parent is None:
            self.count(session, f"fork_{cause}")
        if match.parent is not None and parent is None and cause not in ("thoughts", "root"):
            self.count(session, "drift")
        base, keep = session.tree.base(rendered.text, parent)
        return Prompt(rendered.text, rendered.frame, parent, base, keep, ids.count(rendered.text))

    async def _render(self, session: Session, request: ChatRequest, template: Template) -> Rendered:
        fields = self._fields(session, request, _tools(request))
        return await self.engine.render(renderable(request.messages(), template), fields)

    def _fields(self, session: Session, request: ChatRequest, tools: bytes | None) -> bytes:
        return self.engine.fields(tools, session.policy.thinking, request.tool_choice, request.response_format)

    def _audit(self, session: Session, request: ChatRequest, template: Template, prompt: Prompt) -> None:
        """Compare a bridged prompt with the whole history rendered, beside the answer."""
        task = asyncio.create_task(self._compare(session, request, template, prompt))
        self._audits.add(task)
        task.add_done_callback(self._audits.discard)

    async def _compare(self, session: Session, request: ChatRequest, template: Template, prompt: Prompt) -> None:
        try:
            rendered = await self._render(session, request, template)
        except ApiError as error:
            log.warning("an audit could not render: %s", error)
            return
        self.count(session, "audited")
        if not rendered.text.endswith(b"," + prompt.follow):
            self.count(session, "audit_failed")
            template.problem = "an audit found a suffix that the whole history does not end with"
            log.error("continuity is off from now on: %s", template.problem)

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

    async def _sample(self, session: Session, prompt: Prompt, max_tokens: int) -> Sampled:
        """One sample of which no token read key/value blocks of weights older than the salt says.

        When a sync lands between a call's submission and its start, the call may reuse blocks of the old weights under
        the new ones; it is then sampled again with the new salt.
        """
        spoilt, give_up = 0, time.monotonic() + self.engine.outage_s
        while spoilt < SAMPLES:
            salt = self.version
            sampling = {"temperature": session.policy.temperature, "max_tokens": max_tokens}
            sampled = await self.engine.generate(prompt.text, prompt.frame, sampling, salt)
            if sampled.finish_reason == "abort":
                self.count(session, "engine_aborts")
                spoilt += 1
                continue
            spans = _known_versions(sampled, salt, self._named_weights)
            if spans is None:
                await self._await_weights(session, give_up)
                continue
            if _order(spans[0][0]) <= _order(salt):
                return replace(sampled, versions=spans)
            self.version = max(self.version, spans[0][0], key=_order)
            self.count(session, "resampled")
            spoilt += 1
        raise EngineError(Fault.UNAVAILABLE, f"the engine spoilt {SAMPLES} samples in a row", RETRY_AFTER_S)

    async def _await_weights(self, session: Session, give_up: float) -> None:
        """An engine that was started again serves the weights on disk until it is given the policy's: not an answer."""
        self.count(session, "unversioned")
        if time.monotonic() > give_up:
            message = f"the engine has had no policy weights for {self.engine.outage_s:.0f} s"
            raise EngineError(Fault.UNAVAILABLE, message, RETRY_AFTER_S)
        await asyncio.sleep(WEIGHTS_POLL_S)

    def _record(
        self,
        session: Session,
        request: ChatRequest,
        match: Match,
        prompt: Prompt,
        sampled: Sampled,
        message: Message,
        template: Template,
    ) -> Node:
        """The call as the tree and the journal keep it."""
        call_id = len(session.tree.nodes)
        figures = Figures(sampled.finish_reason, prompt.count, sampled.count, sampled.cached_tokens)
        exact = template.processed_logprobs or session.policy.temperature == 1.0
        return Node(
            call_id=call_id,
            parent=prompt.parent,
            base=prompt.base,
            keep=prompt.keep,
            suffix=prompt.suffix,
            sampled=sampled.text,
            logprobs=ids.pack_floats(sampled.logprobs),
            versions=sampled.versions,
            answer=canonical_answer(session, call_id, request, message, figures, template.parallel_calls),
            chain=match.chain,
            constraint=request.constraint,
            dialect=request.dialect.name,
            trainable=exact and not request.forced and not request.foreign,
            malformed=is_malformed(request, message),
            ended=sampled.ended,
            agent=request.agent,
            wishes=session.news(request.wishes),
            origin=request.origin,
            answered=time.clock_gettime(time.CLOCK_BOOTTIME),
        )


def _tools(request: ChatRequest) -> bytes | None:
    return request.tools.data if request.tools else None


def _frame_key(request: ChatRequest) -> tuple[bytes, str]:
    return (request.tools.digest if request.tools else b"", request.constraint)


def _order(version: str) -> tuple[int, int]:
    """ "attempt.n" as numbers. Raises ValueError for another form."""
    attempt, n = version.split(".")
    return int(attempt), int(n)


def _known_versions(sampled: Sampled, current: str, named: bool) -> list[tuple[str, int, int]] | None:
    """The engine's spans, or None when a name in them is no policy version but should be.

    ``current`` stands for spans that the engine does not tell, and for other names where they are allowed.
    """
    spans = sampled.versions or [(current, 0, sampled.count)]
    try:
        for version, _, _ in spans:
            _order(version)
    except ValueError:
        return None if named else [(current, start, end) for _, start, end in spans]
    return spans


def canonical_answer(
    session: Session,
    call_id: int,
    request: ChatRequest,
    message: Message,
    figures: Figures,
    parallel_calls: bool = True,
) -> Answer:
    """The canonical answer. Tool-call ids are ours, unique in the session: a replayed history is recognised by them.

    Only the first call is kept where the request or (``parallel_calls``) the chat template takes no more.
    """
    calls = message.tool_calls or []
    if not (parallel_calls and request.parallel_tool_calls):
        calls = calls[:1]
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

"""Text mode: any OpenAI-compatible Chat Completions upstream, without token ids. Its traces are never trained."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from pipeline.capture.canonical import ChatMessage
from pipeline.capture.client import ConnectionFailed, Reply, ReplyTimeout
from pipeline.capture.dialects.base import ApiError, ChatRequest, Fault
from pipeline.capture.journal import Journal, Node, Policy
from pipeline.capture.session import Session
from pipeline.capture.turn import Figures, Turns, canonical_answer, is_malformed
from pipeline.capture.upstream import EngineError, Message, decoded, patiently

CONNECT_S = 5.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Token counts, where the upstream gives them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _TextMessage(Message):
    reasoning_content: str | None = None  # another server's word for ``reasoning``


class _Choice(msgspec.Struct):
    message: _TextMessage
    finish_reason: str | None = None


class Completion(msgspec.Struct):
    """A chat completion."""

    choices: list[_Choice]
    usage: Usage | None = None

    @property
    def message(self) -> Message:
        """The assistant's message. Raises ApiError when there is none."""
        if not self.choices:
            raise EngineError(Fault.INTERNAL, "the engine's reply holds no choice")
        message = self.choices[0].message
        return Message(message.content, message.reasoning or message.reasoning_content, message.tool_calls)

    @property
    def figures(self) -> Figures:
        """Why it ended and how long it is; 0 for what the upstream does not tell."""
        usage = self.usage or Usage()
        cached = (usage.prompt_tokens_details or _Details()).cached_tokens
        reason = self.choices[0].finish_reason or "stop"
        return Figures(reason, usage.prompt_tokens or 0, usage.completion_tokens or 0, cached or 0)


_COMPLETION = msgspec.json.Decoder(Completion)


def trusts_environment(url: str) -> bool:
    """Whether the environment's HTTP proxy may be asked for this URL."""
    return urlsplit(url).hostname not in LOOPBACK


def api_base(url: str) -> str:
    """A base URL as OpenAI's clients take it; a bare ``http://host:port`` means ``…/v1``."""
    return url.rstrip("/") if urlsplit(url).path.strip("/") else url.rstrip("/") + "/v1"


class TextUpstream:
    """One upstream, by its base URL."""

    def __init__(self, url: str, model: str, key: str = "", request_timeout_s: float = 300.0, outage_s: float = 60.0):
        place = urlsplit(api_base(url))
        self._path = place.path + "/chat/completions"
        self._model, self._request_timeout_s, self._outage_s = model, request_timeout_s, outage_s
        self._client = httpx.AsyncClient(
            base_url=f"{place.scheme}://{place.netloc}",
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None),
            trust_env=trusts_environment(url),
        )

    async def complete(
        self, request: ChatRequest, messages: list[ChatMessage], policy: Policy, waits: Callable[[], None]
    ) -> Completion:
        """One answer, sampled as the session's policy says. Raises ApiError as the engine does.

        ``waits`` is called when an outage or a rate limit is going to be waited out.
        """
        body = msgspec.json.encode(self._body(request, messages, policy))
        reply = await patiently(lambda: self._post(body), self._path, self._outage_s, waits)
        return decoded(self._path, reply, _COMPLETION)

    def _body(self, request: ChatRequest, messages: list[ChatMessage], policy: Policy) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            "temperature": policy.temperature,
            "max_tokens": min(policy.max_tokens, request.max_tokens or policy.max_tokens),
        }
        if request.tools:
            body["tools"] = request.tools.functions
            body |= {} if request.tool_choice is None else {"tool_choice": request.tool_choice}
        if request.response_format:
            body["response_format"] = request.response_format
        return body

    async def _post(self, body: bytes) -> Reply:
        headers = {"content-type": "application/json"}
        try:
            async with asyncio.timeout(self._request_timeout_s):
                reply = await self._client.post(self._path, content=body, headers=headers)
        except TimeoutError as error:
            message = f"no whole reply to {self._path} within {self._request_timeout_s:.0f} s"
            raise ReplyTimeout(message) from error
        except httpx.TransportError as error:
            raise ConnectionFailed(f"{self._client.base_url}: {error!r}") from error
        told = reply.headers.get("retry-after", "")
        return Reply(reply.status_code, reply.content, int(told) if told.isdecimal() else None)


class TextTurns(Turns):
    """Turns whose calls have no ids: the request and the answer are kept as text, and nothing is trainable."""

    def __init__(self, upstream: TextUpstream, journal: Journal) -> None:
        super().__init__(journal)
        self._upstream = upstream

    async def warm(self) -> None:
        """Nothing: any API will do."""

    async def prompt_tokens(self, session: Session, request: ChatRequest) -> int:
        """Raises ApiError: without a tokenizer a count would be a guess, and harnesses compact by it."""
        raise ApiError(Fault.NOT_FOUND, "this upstream counts no tokens")

    async def _answer(self, session: Session, request: ChatRequest) -> Node:
        began = time.monotonic()
        match = self.match(session, request)
        if known := session.undelivered(match.chain, request.constraint, request.foreign):
            self.count(session, "redelivered")
            return known
        messages = request.messages()
        with self._spending(session):
            sent = time.monotonic()
            completion = await self._upstream.complete(
                request, messages, session.policy, lambda: self._waits(session, request)
            )
            waited, message = time.monotonic() - sent, completion.message
        call_id = len(session.tree.nodes)
        node = Node(
            call_id=call_id,
            parent=match.parent,
            base=None,
            keep=0,
            suffix=b"",
            sampled=b"",
            logprobs=b"",
            versions=[],
            answer=canonical_answer(session, call_id, request, message, completion.figures),
            chain=match.chain,
            constraint=request.constraint,
            dialect=request.dialect.name,
            trainable=False,
            malformed=is_malformed(request, message),
            seconds=time.monotonic() - began,
            agent=request.agent,
            wishes=session.news(request.wishes),
            asked=session.transcript.asked(messages, request.tools.functions if request.tools else None),
            origin=request.origin,
            answered=time.clock_gettime(time.CLOCK_BOOTTIME),
        )
        self.added(node.seconds - waited)
        return self._keep(session, node)

    def _waits(self, session: Session, request: ChatRequest) -> None:
        if not request.foreign:
            self.count(session, "outages")

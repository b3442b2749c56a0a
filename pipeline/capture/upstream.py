"""The engine as the proxy uses it: render (text to ids), generate (ids to ids), derender (ids to a parsed message).

An outage (no connection, a dropped one, 5xx) is waited out for a bounded time, so an engine restart costs a harness
only patience.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from pipeline.capture.client import ConnectionFailed, HttpClient, Reply, ReplyTimeout
from pipeline.capture.dialects.base import ApiError, ChatRequest, Fault

# What render may decide about sampling; everything else is the session's policy or neutral.
FROM_RENDER = ("stop_token_ids", "structured_outputs", "skip_special_tokens")
NEUTRAL = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logprobs": 0,
    "detokenize": False,
}
CONTEXT_PHRASES = (
    "maximum context length", "maximum model length", "longer than the maximum", "context_length_exceeded",
)  # fmt: skip
BUSY = 429  # of hosted upstreams: waited out like an outage
RETRY_AFTER_S = 5


class Rendered(msgspec.Struct):
    """A prompt as token ids, with what the engine derived from the request."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True)
class Sampled:
    """What the engine sampled: ids with the end token, their logprobs, and (version, start, end) spans in its words."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: str  # stop | length | abort
    stop_reason: int | str | None
    versions: list[tuple[str, int, int]]
    cached_tokens: int

    @property
    def text_ids(self) -> list[int]:
        """The ids without the end token, which the engine's parsers would leak into the text."""
        ended = self.finish_reason == "stop" and self.stop_reason in (None, self.ids[-1])
        return self.ids[:-1] if ended else self.ids


class Function(msgspec.Struct):
    """A called function."""

    name: str
    arguments: str = ""


class Called(msgspec.Struct):
    """A tool call as the engine's parser found it."""

    function: Function


class Message(msgspec.Struct):
    """An assistant message as the engine's parsers made it from ids."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Called] | None = None


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _GeneratedChoice(msgspec.Struct):
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None


class _Generated(msgspec.Struct):
    choices: list[_GeneratedChoice]
    usage: _Usage | None = None


class _DerenderedChoice(msgspec.Struct):
    message: Message


class _Derendered(msgspec.Struct):
    choices: list[_DerenderedChoice]


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


T = TypeVar("T")


class Engine:
    """One engine. Its methods raise ApiError: UNAVAILABLE after an outage or a deadline, CONTEXT for a full window."""

    def __init__(self, url: str, model: str, request_timeout_s: float = 300.0, outage_s: float = 60.0) -> None:
        place = urlsplit(url)
        self.model = model
        self._client = HttpClient(place.hostname or "127.0.0.1", place.port or 80)
        self._request_timeout_s, self.outage_s = request_timeout_s, outage_s
        self._context: int | None = None

    async def context_length(self) -> int:
        """The window in tokens (asked once)."""
        if self._context is None:
            models = await self._call("GET", "/v1/models", None, _Models)
            lengths = [model.max_model_len for model in models.data if model.id == self.model and model.max_model_len]
            if not lengths:
                raise ApiError(Fault.INTERNAL, f"the engine does not serve a model named {self.model!r}")
            self._context = lengths[0]
        return self._context

    async def render(self, request: ChatRequest) -> Rendered:
        """The request's whole history as ids."""
        body = {"model": self.model, "messages": request.messages, **tool_fields(request)}
        if request.response_format:
            body["response_format"] = request.response_format
        return await self._call("POST", "/v1/chat/completions/render", body, Rendered)

    async def generate(self, rendered: Rendered, temperature: float, max_tokens: int, salt: str) -> Sampled:
        """One sample; ``salt`` keeps it off key/value blocks of other weights. No seed: it kills the CPU engine."""
        decided = {
            key: rendered.sampling_params[key] for key in FROM_RENDER if rendered.sampling_params.get(key) is not None
        }
        body: dict[str, Any] = {
            "model": self.model,
            "token_ids": rendered.token_ids,
            "sampling_params": decided | NEUTRAL | {"temperature": temperature, "max_tokens": max_tokens},
            "cache_salt": salt,
            "reasoning_ended": rendered.reasoning_ended,
            "reasoning_parser_kwargs": rendered.reasoning_parser_kwargs,
        }
        return _sampled(await self._call("POST", "/inference/v1/generate", body, _Generated))

    async def derender(self, request: ChatRequest, rendered: Rendered, sampled: Sampled) -> Message:
        """The sampled ids as a message; no ids but the end token is an empty one, which the engine would refuse."""
        if not sampled.text_ids:
            return Message()
        kwargs = (rendered.reasoning_parser_kwargs or {}).get("chat_template_kwargs")
        choice = {"index": 0, "finish_reason": sampled.finish_reason, "token_ids": sampled.text_ids}
        body = {
            "model": self.model,
            "generate_response": {"choices": [choice], "prompt_token_ids": rendered.token_ids},
            "prompt_token_ids": rendered.token_ids[-8:],
            "prompt_tokens": len(rendered.token_ids),
            "chat_request": {
                "model": self.model,
                "messages": [],
                "chat_template_kwargs": kwargs,
                **tool_fields(request),
            },
        }
        reply = await self._call("POST", "/v1/chat/completions/derender", body, _Derendered)
        return reply.choices[0].message

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, kind: type[T]) -> T:
        data = b"" if body is None else msgspec.json.encode(body)
        timeout_s = self._request_timeout_s
        reply = await patiently(lambda: self._client.request(method, path, data, timeout_s), path, self.outage_s)
        return decoded(path, reply, kind)


async def patiently(request: Callable[[], Awaitable[Reply]], path: str, outage_s: float) -> Reply:
    """The first reply that is no sign of an outage. Raises ApiError(UNAVAILABLE) after ``outage_s`` or a deadline."""
    give_up, delay = 0.0, 0.1
    while True:
        try:
            reply = await request()
            if reply.status < 500 and reply.status != BUSY:
                return reply
            reason = f"status {reply.status}: {reply.body[:200]!r}"
        except ConnectionFailed as error:
            reason = str(error)
        except ReplyTimeout as error:
            raise ApiError(Fault.UNAVAILABLE, str(error), RETRY_AFTER_S) from error
        give_up = give_up or time.monotonic() + outage_s
        if time.monotonic() + delay > give_up:
            message = f"the engine did not answer {path} for {outage_s:.0f} s ({reason})"
            raise ApiError(Fault.UNAVAILABLE, message, RETRY_AFTER_S)
        await asyncio.sleep(delay)
        delay = min(delay * 2, 2.0)


def decoded(path: str, reply: Reply, kind: type[T]) -> T:
    """The body of a reply. Raises ApiError for a refusal or another form."""
    if reply.status != 200:
        raise _refusal(path, reply)
    try:
        return msgspec.json.decode(reply.body, type=kind)
    except msgspec.DecodeError as error:
        raise ApiError(Fault.INTERNAL, f"the engine's reply to {path} is not what it should be: {error}") from error


def tool_fields(request: ChatRequest) -> dict[str, Any]:
    """The fields by which render and derender know the tools."""
    fields: dict[str, Any] = {"tools": request.tools} if request.tools else {}
    if request.tools and request.tool_choice is not None:
        fields["tool_choice"] = request.tool_choice
    return fields


def _sampled(reply: _Generated) -> Sampled:
    choice = reply.choices[0]
    ids = choice.token_ids or []
    logprobs = [entry.logprob for entry in (choice.logprobs and choice.logprobs.content) or ()]
    finish = choice.finish_reason or "stop"
    if finish != "abort" and (not ids or len(ids) != len(logprobs)):
        raise ApiError(Fault.INTERNAL, f"the engine sampled {len(ids)} ids with {len(logprobs)} logprobs")
    spans = [(span.version, span.start, span.end) for span in choice.weight_versions or ()]
    details = reply.usage.prompt_tokens_details if reply.usage else None
    cached = (details.cached_tokens if details else None) or 0
    return Sampled(ids, logprobs, finish, choice.stop_reason, spans, cached)


def _refusal(path: str, reply: Reply) -> ApiError:
    """An engine's 4xx as an error for the harness."""
    if reply.status in (401, 403):  # its words may quote the key
        return ApiError(Fault.INTERNAL, f"the engine refused the proxy's API key ({reply.status})")
    try:
        message = str(msgspec.json.decode(reply.body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        message = reply.body[:300].decode(errors="replace")
    if reply.status == 400 and any(phrase.encode() in reply.body for phrase in CONTEXT_PHRASES):
        return ApiError(Fault.CONTEXT, message)
    if reply.status in (400, 422) and path.endswith(("/render", "/chat/completions")):
        return ApiError(Fault.INVALID, message)
    return ApiError(Fault.INTERNAL, f"the engine refused {path} ({reply.status}): {message}")

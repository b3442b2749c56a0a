"""The engine as the proxy uses it: render (text to ids), generate (ids to ids), derender (ids to a parsed message).

An outage (no connection, a dropped one, 5xx) is waited out for a bounded time, so an engine restart costs a harness
only patience.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Raw

from pipeline.capture import ids
from pipeline.capture.canonical import ChatMessage
from pipeline.capture.client import ConnectionFailed, HttpClient, Reply, ReplyTimeout
from pipeline.capture.dialects.base import ApiError, Fault

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
MOST_500 = 3
PROMPT_TAIL = 64  # ids
NULL = Raw(b"null")


class EngineError(ApiError):
    """The engine's fault, not the request's."""


class Frame(msgspec.Struct, frozen=True):
    """What the engine derived from a rendered request and wants back with generate and derender."""

    sampling_params: dict[str, Any] = {}
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True)
class Rendered:
    """A prompt as ids (text, see ``capture.ids``)."""

    text: bytes
    frame: Frame


@dataclass(frozen=True)
class Sampled:
    """What the engine sampled: ids with the end token, their logprobs, and (version, start, end) spans in its words."""

    text: bytes
    count: int
    logprobs: list[float]
    finish_reason: str  # stop | length | abort
    stop_reason: int | str | None
    versions: list[tuple[str, int, int]]
    cached_tokens: int

    @property
    def ended(self) -> bool:
        """Whether the last id is an end token (and not the last of a stop string)."""
        if self.finish_reason != "stop":
            return False
        return self.stop_reason is None or str(self.stop_reason).encode() == ids.last(self.text)

    @property
    def said(self) -> bytes:
        """The ids without the end token, which the engine's parsers would leak into the text."""
        return ids.without_last(self.text) if self.ended else self.text


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


class _Logprob(msgspec.Struct, gc=False):
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
    token_ids: Raw = NULL
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None


class _TopLogprobs(msgspec.Struct):
    top_logprobs: list[_Logprob] = []


class _TopContent(msgspec.Struct):
    content: list[_TopLogprobs] | None = None


class _TopChoice(msgspec.Struct):
    logprobs: _TopContent | None = None


class _Tops(msgspec.Struct):
    choices: list[_TopChoice]


class _RenderReply(msgspec.Struct):
    token_ids: Raw
    sampling_params: dict[str, Any] = {}
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None


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
_RENDER = msgspec.json.Decoder(_RenderReply)
_GENERATE = msgspec.json.Decoder(_Generated)
_TOPS = msgspec.json.Decoder(_Tops)
_DERENDER = msgspec.json.Decoder(_Derendered)
_MODELS = msgspec.json.Decoder(_Models)
_encode = msgspec.json.Encoder().encode


class Engine:
    """One engine. Its methods raise ApiError: UNAVAILABLE after an outage, TIMEOUT, CONTEXT for a full window.

    ``extra`` fields go into every render and derender (a chat template, for example).
    """

    def __init__(
        self,
        url: str,
        model: str,
        request_timeout_s: float = 300.0,
        outage_s: float = 60.0,
        extra: dict[str, Any] | None = None,
    ) -> None:
        place = urlsplit(url)
        self.model = model
        self._name = _encode(model)
        given = dict(extra or {})
        self._kwargs: dict[str, Any] = given.pop("chat_template_kwargs", {})
        self._extra = b"," + _encode(given)[1:-1] if given else b""
        self._client = HttpClient(place.hostname or "127.0.0.1", place.port or 80)
        self._request_timeout_s, self.outage_s = request_timeout_s, outage_s
        self._context: int | None = None

    def fields(
        self,
        tools: bytes | None,
        thinking: bool | None = None,
        tool_choice: Any = None,
        response_format: dict[str, Any] | None = None,
    ) -> bytes:
        """The fields of a chat request beside its messages, as a piece of JSON. ``tools`` is JSON text."""
        fields = b',"tools":%b' % tools if tools else b""
        if tools and tool_choice is not None:
            fields += b',"tool_choice":%b' % _encode(tool_choice)
        if response_format:
            fields += b',"response_format":%b' % _encode(response_format)
        kwargs = self._kwargs | ({} if thinking is None else {"enable_thinking": thinking})
        return fields + (b',"chat_template_kwargs":%b' % _encode(kwargs) if kwargs else b"")

    async def context_length(self) -> int:
        """The window in tokens (asked once)."""
        if self._context is None:
            models = await self._call("GET", "/v1/models", (), _MODELS)
            lengths = [model.max_model_len for model in models.data if model.id == self.model and model.max_model_len]
            if not lengths:
                raise EngineError(Fault.INTERNAL, f"the engine does not serve a model named {self.model!r}")
            self._context = lengths[0]
        return self._context

    async def render(self, messages: Sequence[ChatMessage], fields: bytes = b"") -> Rendered:
        """A conversation as ids. ``fields``: what ``fields`` makes. Raises ApiError(INVALID) if refused."""
        body = b'{"model":%b,"messages":%b%b%b}' % (self._name, _encode(messages), fields, self._extra)
        reply = await self._call("POST", "/v1/chat/completions/render", (body,), _RENDER)
        frame = Frame(reply.sampling_params, reply.reasoning_ended, reply.reasoning_parser_kwargs)
        return Rendered(ids.inner(reply.token_ids), frame)

    async def generate(self, prompt: bytes, frame: Frame, sampling: dict[str, Any], salt: str) -> Sampled:
        """One sample; ``salt`` keeps it off key/value blocks of other weights. No seed: it kills the CPU engine."""
        body = self._generation(prompt, frame, sampling, salt)
        return _sampled(await self._call("POST", "/inference/v1/generate", body, _GENERATE))

    async def gap(self, prompt: bytes, frame: Frame, temperature: float) -> float:
        """The difference of the two best logprobs of the next token.

        Three are asked for: the sampled token may be listed beside the best two.
        """
        sampling = {"temperature": temperature, "max_tokens": 1, "logprobs": 3}
        body = self._generation(prompt, frame, sampling, "selftest")
        return _gap(await self._call("POST", "/inference/v1/generate", body, _TOPS))

    def _generation(self, prompt: bytes, frame: Frame, sampling: dict[str, Any], salt: str) -> Sequence[bytes]:
        """The body of a generate request, in parts: the prompt may be long."""
        decided = {key: frame.sampling_params[key] for key in FROM_RENDER if frame.sampling_params.get(key) is not None}
        rest = {
            "sampling_params": decided | NEUTRAL | sampling,
            "cache_salt": salt,
            "reasoning_ended": frame.reasoning_ended,
            "reasoning_parser_kwargs": frame.reasoning_parser_kwargs,
        }
        return (b'{"model":%b,"token_ids":[' % self._name, prompt, b"]," + _encode(rest)[1:])

    async def derender(
        self, prompt: bytes, prompt_tokens: int, frame: Frame, sampled: Sampled, fields: bytes = b""
    ) -> Message:
        """The sampled ids as a message; no ids but the end token is an empty one, which the engine would refuse.

        The parsers look at the end of the prompt only (is a thought open?), so only that is sent.
        """
        if not sampled.said:
            return Message()
        end = ids.tail(prompt, PROMPT_TAIL)
        body = (
            b'{"model":%b,"generate_response":{"choices":[{"index":0,"finish_reason":"%b","token_ids":[%b]}],'
            b'"prompt_token_ids":[%b]},"prompt_token_ids":[%b],"prompt_tokens":%d,'
            b'"chat_request":{"model":%b,"messages":[]%b%b}}'
        ) % (
            self._name, sampled.finish_reason.encode(), sampled.said, end, end, prompt_tokens, self._name, fields,
            self._extra,
        )  # fmt: skip
        reply = await self._call("POST", "/v1/chat/completions/derender", (body,), _DERENDER)
        return reply.choices[0].message

    async def _call(self, method: str, path: str, body: Sequence[bytes], decoder: msgspec.json.Decoder[T]) -> T:
        timeout_s = self._request_timeout_s
        reply = await patiently(lambda: self._client.request(method, path, body, timeout_s), path, self.outage_s)
        return decoded(path, reply, decoder)


async def patiently(
    request: Callable[[], Awaitable[Reply]], path: str, outage_s: float, waits: Callable[[], None] = lambda: None
) -> Reply:
    """The first reply that is no sign of an outage. Raises ApiError after ``outage_s``, a deadline, or a lasting 500.

    A 500 may be the request's own fault, so it is tried again only a few times. What a busy upstream says of how long
    to wait is obeyed. ``waits`` is called once, before the first wait.
    """
    give_up, delay, tries = 0.0, 0.1, 0
    pause = delay
    while True:
        try:
            reply = await request()
            if reply.status < 500 and reply.status != BUSY:
                return reply
            tries += reply.status == 500
            error, pause = _outage(path, reply), max(delay, reply.retry_after or 0)
        except ConnectionFailed as failure:
            error, pause = EngineError(Fault.UNAVAILABLE, str(failure), RETRY_AFTER_S), delay
        except ReplyTimeout as failure:
            raise EngineError(Fault.TIMEOUT, str(failure), RETRY_AFTER_S) from failure
        if not give_up:
            waits()
            give_up = time.monotonic() + outage_s
        if tries == MOST_500 or time.monotonic() + pause > give_up:
            error.message = f"the engine did not answer {path}: {error.message}"
            raise error
        await asyncio.sleep(pause)
        delay = min(delay * 2, 2.0)


def _outage(path: str, reply: Reply) -> EngineError:
    """What to tell the harness should this status last."""
    fault = {BUSY: Fault.RATE_LIMITED, 503: Fault.OVERLOADED, 500: Fault.INTERNAL}.get(reply.status, Fault.UNAVAILABLE)
    text = reply.body[:200].decode(errors="replace")
    return EngineError(fault, f"status {reply.status}: {text}", reply.retry_after or RETRY_AFTER_S)


def decoded(path: str, reply: Reply, decoder: msgspec.json.Decoder[T]) -> T:
    """The body of a reply. Raises ApiError for a refusal or another form."""
    if reply.status != 200:
        raise _refusal(path, reply)
    try:
        return decoder.decode(reply.body)
    except msgspec.DecodeError as error:
        raise EngineError(Fault.INTERNAL, f"the engine's reply to {path} is not what it should be: {error}") from error


def _sampled(reply: _Generated) -> Sampled:
    choice = reply.choices[0]
    text = ids.inner(choice.token_ids) if choice.token_ids != NULL else b""
    entries = (choice.logprobs and choice.logprobs.content) or []
    logprobs = [entry.logprob for entry in entries]
    finish, count = choice.finish_reason or "stop", ids.count(text)
    if finish != "abort" and (not count or count != len(logprobs)):
        raise EngineError(Fault.INTERNAL, f"the engine sampled {count} ids with {len(logprobs)} logprobs")
    spans = [(span.version, span.start, span.end) for span in choice.weight_versions or ()]
    details = reply.usage.prompt_tokens_details if reply.usage else None
    cached = (details.cached_tokens if details else None) or 0
    return Sampled(text, count, logprobs, finish, choice.stop_reason, spans, cached)


def _gap(reply: _Tops) -> float:
    """The difference of the first token's two best logprobs; 0 where there are none."""
    content = reply.choices[0].logprobs and reply.choices[0].logprobs.content
    top = sorted((entry.logprob for entry in content[0].top_logprobs), reverse=True) if content else []
    return top[0] - top[1] if len(top) > 1 else 0.0


def _refusal(path: str, reply: Reply) -> ApiError:
    """An engine's 4xx as an error for the harness."""
    if reply.status in (401, 403):  # its words may quote the key
        return EngineError(Fault.INTERNAL, f"the engine refused the proxy's API key ({reply.status})")
    try:
        message = str(msgspec.json.decode(reply.body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        message = reply.body[:300].decode(errors="replace")
    if reply.status == 400 and any(phrase.encode() in reply.body for phrase in CONTEXT_PHRASES):
        return ApiError(Fault.CONTEXT, message)
    if reply.status in (400, 422) and path.endswith(("/render", "/chat/completions")):
        return ApiError(Fault.INVALID, message)
    return EngineError(Fault.INTERNAL, f"the engine refused {path} ({reply.status}): {message}")

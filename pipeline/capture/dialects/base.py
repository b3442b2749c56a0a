"""What a dialect supplies to the one-turn pipeline, and the canonical request and answer that the pipeline works on.

Canonical means OpenAI Chat Completions messages and tools: what the engine's render endpoint takes.
"""

from __future__ import annotations

import enum
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec


class Fault(enum.StrEnum):
    """Why a request gets an error instead of an answer; a dialect's table turns it into its own code."""

    INVALID = "invalid"
    UNAUTHORIZED = "unauthorized"
    NOT_FOUND = "not_found"
    TOO_LARGE = "too_large"
    CONTEXT = "context"
    BUDGET = "budget"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"


STATUS = {
    Fault.INVALID: 400,
    Fault.UNAUTHORIZED: 401,
    Fault.NOT_FOUND: 404,
    Fault.TOO_LARGE: 413,
    Fault.CONTEXT: 400,
    Fault.BUDGET: 400,
    Fault.UNAVAILABLE: 503,
    Fault.INTERNAL: 500,
}


class ApiError(Exception):
    """An error for the harness, in no dialect yet. ``retry_after`` is in seconds."""

    def __init__(self, fault: Fault, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.fault = fault
        self.message = message
        self.retry_after = retry_after

    @property
    def status(self) -> int:
        """The HTTP status."""
        return STATUS[self.fault]


@dataclass(frozen=True)
class ChatRequest:
    """One request in canonical form. Sampling wishes other than ``max_tokens`` are not obeyed, so they are not kept."""

    messages: list[dict[str, Any]]
    model: str
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None  # None, "auto", "none", "required" or a named function
    response_format: dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False

    @property
    def forced(self) -> bool:
        """A grammar shapes the answer, so its logprobs are not the policy's."""
        free_choice = self.tool_choice in (None, "auto", "none")
        return not (free_choice and (self.response_format or {}).get("type", "text") == "text")

    @property
    def constraint(self) -> str:
        """Identifies what shapes an answer besides the prompt ids; "" for an ordinary request."""
        if not self.forced and self.tool_choice != "none" and self.parallel_tool_calls:
            return ""
        wish = msgspec.json.encode([self.tool_choice, self.response_format, self.parallel_tool_calls], order="sorted")
        return hashlib.blake2b(wish, digest_size=8).hexdigest()


class ToolCall(msgspec.Struct, frozen=True):
    """One parsed tool call; ``arguments`` is the JSON text as the engine's parser gave it."""

    id: str
    name: str
    arguments: str


class Answer(msgspec.Struct, frozen=True):
    """One answer in canonical form, with true token counts."""

    id: str
    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str  # stop | length | tool_calls
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    created: int  # Unix seconds


class Action(enum.StrEnum):
    """What a route does."""

    TURN = "turn"
    COUNT_TOKENS = "count_tokens"
    MODELS = "models"
    HELLO = "hello"


@dataclass(frozen=True)
class Route:
    """One (method, path) of a dialect; ``pattern`` must match the whole path."""

    method: str
    pattern: re.Pattern[str]
    action: Action
    open: bool = field(default=False)  # answered without a key


def route(method: str, pattern: str, action: Action, open: bool = False) -> Route:
    """A Route from the text of its pattern."""
    return Route(method, re.compile(pattern), action, open)


class Dialect(ABC):
    """The hooks of one model API. A dialect holds no state; the turn belongs to ``capture.turn``."""

    name: ClassVar[str]
    routes: ClassVar[tuple[Route, ...]]
    ping: ClassVar[bytes] = b": ping\n\n"  # keeps a started stream alive

    def key(self, headers: Mapping[str, str]) -> str:
        """The caller's key; "" when there is none."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        return token.strip() if scheme.lower() == "bearer" else ""

    @abstractmethod
    def parse(self, body: dict[str, Any]) -> ChatRequest:
        """The canonical request. Raises ApiError(INVALID)."""

    @abstractmethod
    def answer(self, request: ChatRequest, answer: Answer) -> dict[str, Any]:
        """The JSON body of an answer that is not streamed."""

    @abstractmethod
    def events(self, request: ChatRequest, answer: Answer) -> bytes:
        """The whole event stream of an answer."""

    @abstractmethod
    def error(self, error: ApiError) -> dict[str, Any]:
        """The JSON body of an error."""

    @abstractmethod
    def stream_error(self, error: ApiError) -> bytes:
        """The event that ends a stream whose headers are already out."""

    def token_count(self, count: int) -> dict[str, Any]:
        """The body that answers a request to count tokens."""
        return {"input_tokens": count}

    def models(self, model: str) -> dict[str, Any]:
        """The body of a model list."""
        return {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "yoke"}]}


def require(condition: object, message: str) -> None:
    """Raise ApiError(INVALID) with ``message`` unless the condition holds."""
    if not condition:
        raise ApiError(Fault.INVALID, message)


def positive(value: Any, name: str) -> int | None:
    """A positive integer or None. Raises ApiError(INVALID)."""
    if value is None:
        return None
    require(isinstance(value, int) and not isinstance(value, bool) and value > 0, f"{name} must be a positive integer")
    return int(value)


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event with JSON data."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"

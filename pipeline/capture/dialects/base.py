"""What a dialect supplies to the one-turn pipeline, and the canonical request and answer that the pipeline works on.

Canonical means OpenAI Chat Completions messages and tools: what the engine's render endpoint takes. ``Dialect.parse``
owns the way from bytes to request: field table, history, tools, memo; a dialect fills in the hooks.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import parse_qs

import msgspec
import xxhash
from msgspec import Raw

from pipeline.capture.canonical import Atom, ChatMessage, Item, Memo, ToolSet, assemble, atoms_of
from pipeline.capture.dialects.fields import Fields, Rule, Use
from pipeline.capture.origin import Origin


class Fault(enum.StrEnum):
    """Why a request gets an error instead of an answer; a dialect's table turns it into its own code."""

    INVALID = "invalid"
    UNAUTHORIZED = "unauthorized"
    NOT_FOUND = "not_found"
    METHOD = "method"
    SLOW_REQUEST = "slow_request"
    TOO_LARGE = "too_large"
    MISDIRECTED = "misdirected"
    CONTEXT = "context"
    BUDGET = "budget"
    RATE_LIMITED = "rate_limited"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    INTERNAL = "internal"


STATUS = {
    Fault.INVALID: 400,
    Fault.UNAUTHORIZED: 401,
    Fault.NOT_FOUND: 404,
    Fault.METHOD: 405,
    Fault.SLOW_REQUEST: 408,
    Fault.TOO_LARGE: 413,
    Fault.MISDIRECTED: 421,
    Fault.CONTEXT: 400,
    Fault.BUDGET: 400,
    Fault.RATE_LIMITED: 429,
    Fault.OVERLOADED: 503,
    Fault.UNAVAILABLE: 503,
    Fault.TIMEOUT: 504,
    Fault.INTERNAL: 500,
}

# A header that only sub-agents send -> the header that names the sub-agent.
AGENT_HEADERS = (
    ("x-claude-code-agent-id", "x-claude-code-agent-id"),
    ("x-openai-subagent", "thread-id"),
    ("x-codex-parent-thread-id", "thread-id"),
    ("x-parent-session-id", "x-session-id"),
)


class ApiError(Exception):
    """An error for the harness, in no dialect yet. ``retry_after`` is in seconds."""

    def __init__(self, fault: Fault, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.fault = fault
        self.message = message
        self.retry_after = retry_after


@dataclass
class ChatRequest:
    """One request in canonical form. The history stays wire text until somebody needs it."""

    dialect: Dialect
    items: list[Item]
    atoms: list[tuple[Atom, ...]]
    model: str
    tools: ToolSet | None = None
    tool_choice: Any = None  # None, "auto", "none", "required" or {"type": "function", "function": {"name"}}
    response_format: dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    wishes: dict[str, Any] = field(default_factory=dict)  # sampling that was asked for and is not obeyed
    dropped: tuple[str, ...] = ()  # fields and tools without effect
    extra: dict[str, Any] = field(default_factory=dict)  # what only the dialect itself needs for its answer
    agent: str = ""  # the sub-agent's name, where a header tells it
    origin: Origin = Origin.UNSEEN

    def messages(self, start: int = 0) -> list[ChatMessage]:
        """The canonical history from item ``start`` on."""
        return assemble(message for item in self.items[start:] for message in self.dialect.decoded(item))

    @property
    def foreign(self) -> bool:
        """The harness is not who asks."""
        return self.origin is Origin.FOREIGN

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

    @property
    def reasoning_tokens(self) -> int:
        """Of the completion tokens those of the thought, by its share of the characters: no API gives the count."""
        calls = sum(len(call.name) + len(call.arguments) for call in self.tool_calls)
        thought = len(self.reasoning)
        return round(self.completion_tokens * thought / ((thought + len(self.text) + calls) or 1))


class Action(enum.StrEnum):
    """What a route does."""

    TURN = "turn"
    COUNT_TOKENS = "count_tokens"
    MODELS = "models"
    HELLO = "hello"
    SOCKET = "socket"  # turns, as many as the client likes


@dataclass(frozen=True)
class Route:
    """One (method, path) of a dialect; ``pattern`` must match the whole path. A WebSocket has a method of its own."""

    method: str
    pattern: re.Pattern[str]
    action: Action
    open: bool = field(default=False)  # answered without a key


def route(method: str, pattern: str, action: Action, open: bool = False) -> Route:
    """A Route from the text of its pattern."""
    return Route(method, re.compile(pattern), action, open)


def api_key(headers: Mapping[str, str], query: str = "") -> str:
    """The caller's key from any of its four places; "" when there is none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    named = headers.get("x-api-key") or headers.get("x-goog-api-key") or bearer
    return named or (parse_qs(query).get("key") or [""])[0]


def agent_of(headers: Mapping[str, str]) -> str:
    """The name of the sub-agent that asks; "" for the main agent and where no header tells."""
    for marker, name in AGENT_HEADERS:
        if marker in headers:
            return headers.get(name) or headers[marker]
    return ""


class Dialect(ABC):
    """The hooks of one model API. A dialect holds no state; the turn belongs to ``capture.turn``."""

    name: ClassVar[str]
    routes: ClassVar[tuple[Route, ...]]
    fields: ClassVar[Mapping[str, Rule]]  # every request field of the API
    statuses: ClassVar[Mapping[Fault, int]] = {}  # where the API differs from STATUS
    ping: ClassVar[bytes] = b": ping\n\n"  # keeps a started stream alive; b"" where the client cannot take one
    _lists: ClassVar[msgspec.json.Decoder[list[Raw]]] = msgspec.json.Decoder(list[Raw])
    _objects: ClassVar[msgspec.json.Decoder[dict[str, Raw]]] = msgspec.json.Decoder(dict[str, Raw])

    def parse(self, body: bytes, memo: Memo, path: str = "", query: str = "") -> ChatRequest:
        """The canonical request. Raises ApiError(INVALID)."""
        given = self.sift(body)
        items = self.items(given)
        require(items, "the request holds no message")
        tools = self._tool_set(given, memo)
        request = self.request(given, path, query)
        request.items, request.atoms = items, [self._atoms(item, memo, given.dropped) for item in items]
        request.tools, request.wishes = tools, given.wishes
        request.dropped = (*given.dropped, *(tools.dropped if tools else ()))
        if tools is not None and not tools.functions:
            request.tools = None
        return request

    def sift(self, body: bytes) -> Fields:
        """The fields of a body, by the table. Raises ApiError(INVALID)."""
        try:
            raw = self._objects.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raw = self._objects.decode(_mended(body))
        given = Fields({}, {}, [])
        self._sift(given, self.fields, raw)
        return given

    def _sift(self, given: Fields, table: Mapping[str, Rule], raw: dict[str, Raw], prefix: str = "") -> None:
        for name, value in raw.items():
            name = self.spelling(name)
            if memoryview(value) != b"null":
                self._place(given, table.get(name), prefix + name, value)

    def _place(self, given: Fields, rule: Rule | None, name: str, value: Raw) -> None:
        if rule is None or rule.use is Use.DROPPED:
            given.dropped.append(name if rule else "unknown")
        elif rule.inner is not None:
            self._sift(given, rule.inner, _decoded(name, value, rule.kind), f"{name}.")
        elif rule.use is Use.HONOURED:
            given.values[name] = value if rule.kind is Raw else _decoded(name, value, rule.kind)
        elif rule.use is Use.OVERRIDDEN:
            given.wishes[name] = _decoded(name, value, Any)
        else:
            message = f"{name}: not supported" + (f"; {rule.hint}" if rule.hint else "")
            require(_decoded(name, value, Any) in rule.harmless, message)

    def _tool_set(self, given: Fields, memo: Memo) -> ToolSet | None:
        wire = given.get("tools")
        if wire is None:
            return None
        key = xxhash.xxh3_128_intdigest(wire)
        known = memo.tools.get(key)
        if known is None:
            tools = _decoded("tools", wire, list[dict[str, Any]])
            known = memo.tools[key] = self.tool_set(tools)
        return known

    def _atoms(self, item: Item, memo: Memo, dropped: list[str]) -> tuple[Atom, ...]:
        key = xxhash.xxh3_128_intdigest(item.raw) ^ (item.kind == "system")
        known = memo.atoms.get(key)
        if known is None:
            wire = _decoded("messages", item.raw, Any)
            known = memo.atoms[key] = atoms_of(self.messages(item.kind, wire))
            dropped += self.lost(item.kind, wire)
        return known

    def decoded(self, item: Item) -> list[ChatMessage]:
        """One wire item as canonical messages. Raises ApiError(INVALID)."""
        return self.messages(item.kind, _decoded("messages", item.raw, Any))

    def split(self, name: str, value: Raw | bytes) -> list[Item]:
        """The items of a JSON list, still as text. Raises ApiError(INVALID)."""
        try:
            return [Item("", raw) for raw in self._lists.decode(value)]
        except msgspec.DecodeError as error:
            raise ApiError(Fault.INVALID, f"{name}: must be a list: {error}") from error

    @abstractmethod
    def items(self, given: Fields) -> list[Item]:
        """The wire items of the history in order, instructions that stand elsewhere (kind "system") first."""

    @abstractmethod
    def messages(self, kind: str, item: Any) -> list[ChatMessage]:
        """The canonical messages of one decoded wire item, whatever stands beside it. Raises ApiError(INVALID).

        Assistant items that belong to one turn are joined later; a call or result without an id has id "" (a result
        then carries ``name``).
        """

    def lost(self, kind: str, item: Any) -> Iterable[str]:
        """What of a decoded item has no place in canonical messages; counted once, when the item is first seen."""
        return ()

    def spelling(self, name: str) -> str:
        """A field's name as the table spells it."""
        return name

    @abstractmethod
    def tool_set(self, tools: list[dict[str, Any]]) -> ToolSet:
        """The wire tools as canonical functions. Raises ApiError(INVALID)."""

    @abstractmethod
    def request(self, given: Fields, path: str, query: str) -> ChatRequest:
        """Everything but history, tools, wishes and dropped fields (leave ``items`` and ``atoms`` empty)."""

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

    def status(self, error: ApiError) -> int:
        """The HTTP status of an error."""
        return self.statuses.get(error.fault) or STATUS[error.fault]

    def token_count(self, count: int) -> dict[str, Any]:
        """The body that answers a request to count tokens."""
        return {"input_tokens": count}

    def models(self, model: str) -> dict[str, Any]:
        """The body of a model list: the APIs share its path, so one body has what the clients of each of them read."""
        known = {"id": model, "object": "model", "created": 0, "owned_by": "yoke", "type": "model"}
        named = {"display_name": model, "created_at": "1970-01-01T00:00:00Z"}
        methods = ["generateContent", "countTokens"]
        gemini = {"name": f"models/{model}", "displayName": model, "supportedGenerationMethods": methods}
        paging = {"has_more": False, "first_id": model, "last_id": model}
        return {"object": "list", "data": [known | named], "models": [gemini]} | paging


def _decoded(name: str, value: Raw | bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(Fault.INVALID, f"{name}: {error}") from error


def _mended(body: bytes) -> bytes:
    """A JSON object in which a harness cut text in the middle of a character: "?" for half a surrogate pair."""
    try:
        value = json.loads(body)
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise ApiError(Fault.INVALID, f"the body is no valid JSON: {error}") from error
    require(isinstance(value, dict), "the body must be a JSON object")
    return text.encode(errors="replace")


def require(condition: object, message: str) -> None:
    """Raise ApiError(INVALID) with ``message`` unless the condition holds."""
    if not condition:
        raise ApiError(Fault.INVALID, message)


def among(value: Any, names: Container[str]) -> bool:
    """Whether an untrusted value is one of some names."""
    return isinstance(value, str) and value in names


def counter(prefix: str, kind: Any) -> str:
    """The name under which something of a kind is counted; kinds come from outside."""
    plain = isinstance(kind, str) and re.fullmatch(r"\w{1,40}", kind, re.ASCII)
    return f"{prefix}_{kind if plain else 'unknown'}"


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

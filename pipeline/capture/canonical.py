"""Canonical history: Chat Completions messages, and the atoms by which two requests are compared.

A dialect turns each wire item into canonical messages by itself; what needs neighbours is done here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import xxhash

ChatMessage = dict[str, Any]


class ReplayedCall(NamedTuple):
    """A tool call as a history holds it; ``arguments`` in canonical JSON, or as they are when they are no JSON."""

    id: str
    name: str
    arguments: str


class Atom(NamedTuple):
    """What is compared of one canonical message. An assistant's is its text and calls, any other's a digest."""

    role: str
    digest: bytes = b""
    text: str = ""
    calls: tuple[ReplayedCall, ...] = ()


class Item(NamedTuple):
    """One wire item of a history. ``kind`` is "system" for instructions that stand outside the list of messages."""

    kind: str
    raw: msgspec.Raw | bytes  # of the request's body, which lives as long as the request


@dataclass(frozen=True)
class Tool:
    """Where a canonical function came from: its kind (``function``, ``custom``, …), wire name and namespace."""

    kind: str
    name: str
    namespace: str = ""


@dataclass(frozen=True)
class ToolSet:
    """The tools of a request as canonical functions."""

    functions: list[dict[str, Any]]
    origins: dict[str, Tool] = field(default_factory=dict)  # canonical name -> what it was; plain functions left out
    dropped: tuple[str, ...] = ()  # kinds of tools that cannot be offered

    def __post_init__(self) -> None:
        data = msgspec.json.encode(self.functions, order="sorted")
        object.__setattr__(self, "digest", xxhash.xxh3_128_digest(data))
        object.__setattr__(self, "data", msgspec.json.encode(self.functions))

    digest: bytes = field(init=False, repr=False)
    data: bytes = field(init=False, repr=False)  # the functions as JSON text, spliced into requests

    def origin(self, name: str) -> Tool:
        """What the canonical function ``name`` was on the wire."""
        return self.origins.get(name) or Tool("function", name)


@dataclass
class Memo:
    """What a session's requests repeat, by the hash of the wire bytes: memory grows with items, not with requests."""

    atoms: dict[int, tuple[Atom, ...]] = field(default_factory=dict)
    tools: dict[int, ToolSet] = field(default_factory=dict)


def atoms_of(messages: Iterable[ChatMessage]) -> tuple[Atom, ...]:
    """The atoms of one item's canonical messages."""
    return tuple(_atom(message) for message in messages)


def _atom(message: ChatMessage) -> Atom:
    role = message["role"]
    if role == "assistant":
        return Atom(role, text=text_of(message.get("content")), calls=tuple(map(_replayed, calls_of(message))))
    key = [message.get("content"), message.get("tool_call_id", "")]
    return Atom(role, xxhash.xxh3_128_digest(msgspec.json.encode(key)))


def _replayed(call: dict[str, Any]) -> ReplayedCall:
    function = call["function"]
    return ReplayedCall(call.get("id") or "", function["name"], canonical_json(function["arguments"]))


def calls_of(message: ChatMessage) -> list[dict[str, Any]]:
    """The tool calls of a canonical assistant message."""
    return message.get("tool_calls") or []


def canonical_json(text: str) -> str:
    """JSON text in one spelling: compact, keys sorted; text that is no JSON stays as it is."""
    try:
        return msgspec.json.encode(msgspec.json.decode(text), order="sorted").decode()
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text


def text_of(content: Any) -> str:
    """The text of a canonical content: a string, None, or a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content if part.get("type") == "text")


def assemble(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    """A history ready to be rendered: consecutive assistant messages are one turn, and every call has an id."""
    history: list[ChatMessage] = []
    for message in messages:
        if message["role"] == "assistant" and history and history[-1]["role"] == "assistant":
            history[-1] = _joined(history[-1], message)
        else:
            history.append(message)
    return _with_ids(history)


def _joined(one: ChatMessage, other: ChatMessage) -> ChatMessage:
    """Two assistant messages of one turn as one."""
    joined = dict(one)
    texts = [text for text in (text_of(one.get("content")), text_of(other.get("content"))) if text]
    joined["content"] = "\n".join(texts) or None
    thoughts = [message["reasoning"] for message in (one, other) if message.get("reasoning")]
    if thoughts:
        joined["reasoning"] = "\n".join(thoughts)
    if calls := calls_of(one) + calls_of(other):
        joined["tool_calls"] = calls
    elif joined["content"] is None:
        joined["content"] = ""
    return joined


def _with_ids(history: list[ChatMessage]) -> list[ChatMessage]:
    """Give calls and results without an id one: a result answers the oldest open call of its name (Gemini)."""
    open_calls: list[tuple[str, str]] = []  # (name, id)
    for index, message in enumerate(history):
        if any(not call.get("id") for call in calls_of(message)):
            calls = [call | {"id": call.get("id") or f"call_{index}_{i}"} for i, call in enumerate(calls_of(message))]
            history[index] = message | {"tool_calls": calls}
            open_calls += [(call["function"]["name"], call["id"]) for call in calls]
        elif message["role"] == "tool" and not message.get("tool_call_id"):
            match = next((call for call in open_calls if call[0] == message.get("name")), None)
            if match:
                open_calls.remove(match)
            history[index] = message | {"tool_call_id": match[1] if match else f"call_{index}"}
    return history

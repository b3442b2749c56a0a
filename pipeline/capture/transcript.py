"""A session's canonical requests, for upstreams that give no token ids: each message is kept once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.capture.dialects.base import Answer
from pipeline.capture.journal import Asked, Node

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None


class Transcript:
    """The whole request of every call, in the order of the answers; shared messages are the same objects."""

    def __init__(self) -> None:
        self._requests: list[tuple[Messages, Tools]] = []

    def asked(self, messages: Messages, tools: Tools) -> Asked:
        """A request as the journal keeps it: what the call before it lacks."""
        keep = _shared(self._requests[-1][0], messages) if self._requests else 0
        return Asked(keep, messages[keep:], tools)

    def add(self, asked: Asked) -> None:
        """Append the request of the next call."""
        before, tools = self._requests[-1] if self._requests else ([], None)
        same = asked.tools == tools
        self._requests.append((before[: asked.keep] + asked.messages, tools if same else asked.tools))

    def export(self, nodes: Sequence[Node]) -> tuple[dict[str, Any], ...]:
        """``{"messages", "tools", "answer"}`` of every call; nothing when the calls have ids instead."""
        return tuple(
            {"messages": messages, "tools": tools or [], "answer": message_of(node.answer)}
            for node, (messages, tools) in zip(nodes, self._requests, strict=bool(self._requests))
        )


def message_of(answer: Answer) -> dict[str, Any]:
    """An answer as a Chat Completions message."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.tool_calls else "")}
    if answer.reasoning:
        message["reasoning"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.tool_calls
        ]
    return message


def _shared(one: Messages, other: Messages) -> int:
    """How many leading messages two requests share."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))

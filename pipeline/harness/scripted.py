"""An action of a scripted model as an answer of a model API: a stream of events of Chat Completions or of Gemini."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pipeline.harness.base import Action

Json = dict[str, Any]


def chat_stream(action: Action, tokens: int, call_id: str) -> bytes:
    """Chat Completions. The prompt had ``tokens`` tokens; ``call_id`` is the id of the tool call."""
    function = {"name": action.tool, "arguments": json.dumps(action.arguments)}
    call = {"index": 0, "id": call_id, "type": "function", "function": function}
    said: Json = {"tool_calls": [call]} if action.tool else {"content": action.text}
    finish = "tool_calls" if action.tool else "stop"
    head: Json = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choices: list[Json] = [
        {"delta": {"role": "assistant", **said}, "finish_reason": None},
        {"delta": {}, "finish_reason": finish},
    ]
    chunks = [{**head, "choices": [{"index": 0, **choice}]} for choice in choices]
    usage = {"prompt_tokens": tokens, "completion_tokens": 5, "total_tokens": tokens + 5}
    return event_stream([*chunks, {**head, "choices": [], "usage": usage}]) + b"data: [DONE]\n\n"


def gemini_stream(action: Action, tokens: int, call_id: str) -> bytes:
    """Gemini, whose tool calls have no ids."""
    call = {"functionCall": {"name": action.tool, "args": action.arguments}}
    part = call if action.tool else {"text": action.text}
    candidate = {"index": 0, "content": {"role": "model", "parts": [part]}, "finishReason": "STOP"}
    usage = {"promptTokenCount": tokens, "candidatesTokenCount": 5, "totalTokenCount": tokens + 5}
    return event_stream([{"candidates": [candidate], "usageMetadata": usage}])


def event_stream(events: Iterable[Json]) -> bytes:
    """Server-sent events, named by their type if they have one."""
    named = [(f"event: {event['type']}\n" if "type" in event else "", json.dumps(event)) for event in events]
    return "".join(f"{name}data: {data}\n\n" for name, data in named).encode()

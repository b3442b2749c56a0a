"""Anthropic Messages, streamed and not, and its token counting."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import Raw

from pipeline.capture.canonical import ChatMessage, Item, ToolSet
from pipeline.capture.dialects.anthropic_blocks import READERS, SERVER_BLOCKS, blocks_of, parts_of
from pipeline.capture.dialects.base import (
    Action,
    Answer,
    ApiError,
    ChatRequest,
    Dialect,
    Fault,
    ToolCall,
    among,
    counter,
    positive,
    require,
    route,
    sse,
)
from pipeline.capture.dialects.fields import DROPPED, OVERRIDDEN, Fields, honoured, inner, rejected

ERRORS = {
    Fault.INVALID: "invalid_request_error",
    Fault.UNAUTHORIZED: "authentication_error",
    Fault.NOT_FOUND: "not_found_error",
    Fault.METHOD: "invalid_request_error",
    Fault.SLOW_REQUEST: "timeout_error",
    Fault.TOO_LARGE: "request_too_large",
    Fault.MISDIRECTED: "invalid_request_error",
    Fault.CONTEXT: "invalid_request_error",
    Fault.BUDGET: "invalid_request_error",
    Fault.RATE_LIMITED: "rate_limit_error",
    Fault.OVERLOADED: "overloaded_error",
    Fault.UNAVAILABLE: "api_error",
    Fault.TIMEOUT: "timeout_error",
    Fault.INTERNAL: "api_error",
}
OUTPUT_FIELDS = {"format": honoured(dict[str, Any]), "effort": OVERRIDDEN, "task_budget": DROPPED}
FIELDS = {
    "model": honoured(str),
    "messages": honoured(Raw),
    "system": honoured(Raw),
    "tools": honoured(Raw),
    "tool_choice": honoured(dict[str, Any]),
    "max_tokens": honoured(),
    "stream": honoured(bool),
    "output_config": inner(OUTPUT_FIELDS),
    "output_format": honoured(dict[str, Any]),
    **dict.fromkeys(("temperature", "top_p", "top_k", "stop_sequences", "thinking"), OVERRIDDEN),
    **dict.fromkeys(
        (
            "cache_control", "metadata", "service_tier", "context_management", "container", "inference_geo", "speed",
            "diagnostics", "billing_policy", "compaction", "fallback_credit_token", "fallbacks",
        ),
        DROPPED,
    ),
    "mcp_servers": rejected([]),
    "thread": rejected(),
}  # fmt: skip
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
TOOL_CHOICES = {"auto": None, "any": "required", "none": "none"}
BILLING = re.compile(r"\Ax-anthropic-billing-header[^\n]*\n*")  # a client's note to its server, not for the model
SIGNATURE = "eW9rZQ=="  # clients throw away or rewrite a thought without one


class Anthropic(Dialect):
    """Blocks become messages: a tool result is a message of its own, a late system message stays where it is.

    Within one assistant message calls follow the text, as canonical messages have it.
    """

    name = "anthropic"
    fields = FIELDS
    ping = b'event: ping\ndata: {"type": "ping"}\n\n'
    statuses = {Fault.OVERLOADED: 529}
    routes = (
        route("POST", r"(/v1)?/messages", Action.TURN),
        route("POST", r"(/v1)?/messages/count_tokens", Action.COUNT_TOKENS),
        route("HEAD", r"/", Action.HELLO, open=True),
        route("GET", r"/api/hello", Action.HELLO, open=True),
        route("HEAD", r"/api/hello", Action.HELLO, open=True),
    )

    def items(self, given: Fields) -> list[Item]:
        require("messages" in given.values, "messages: missing")
        messages = self.split("messages", given.get("messages"))
        require(messages, "messages: must not be empty")
        return [*given.instructions("system"), *messages]

    def messages(self, kind: str, item: Any) -> list[ChatMessage]:
        if kind == "system":
            texts = [BILLING.sub("", part["text"]) for part in parts_of(blocks_of(item, "system"))]
            text = "\n\n".join(filter(None, texts))
            return [{"role": "system", "content": text}] if text else []
        require(isinstance(item, dict) and among(item.get("role"), READERS), "messages: each must have a known role")
        return list(READERS[item["role"]](item))

    def lost(self, kind: str, item: Any) -> Iterable[str]:
        blocks = blocks_of(item if kind == "system" else item.get("content"), "content")
        return [counter("block", block["type"]) for block in blocks if SERVER_BLOCKS.fullmatch(block["type"])]

    def tool_set(self, tools: list[dict[str, Any]]) -> ToolSet:
        own = [tool for tool in tools if "input_schema" in tool]
        require(all(isinstance(tool.get("name"), str) for tool in own), "tools: a name is missing")
        hosted = tuple(counter("tool", tool.get("type")) for tool in tools if "input_schema" not in tool)
        return ToolSet([_function(tool) for tool in own], dropped=hosted)

    def request(self, given: Fields, path: str, query: str) -> ChatRequest:
        choice = given.get("tool_choice", {"type": "auto"})
        return ChatRequest(
            self,
            [],
            [],
            model=given.get("model", ""),
            tool_choice=_tool_choice(choice),
            response_format=_response_format(given.get("output_config.format") or given.get("output_format")),
            parallel_tool_calls=not choice.get("disable_parallel_tool_use"),
            max_tokens=positive(given.get("max_tokens"), "max_tokens"),
            stream=given.get("stream", False),
        )

    def answer(self, request: ChatRequest, answer: Answer) -> dict[str, Any]:
        stop = {"stop_reason": STOP_REASONS[answer.finish_reason], "stop_sequence": None}
        content = [block for block, _ in _blocks(answer)]
        return _head(request, answer) | {"content": content, **stop, "usage": _usage(answer)}

    def events(self, request: ChatRequest, answer: Answer) -> bytes:
        usage = _usage(answer)
        start = _head(request, answer) | {"content": [], "stop_reason": None, "stop_sequence": None}
        events: list[dict[str, Any]] = [
            {"type": "message_start", "message": start | {"usage": usage | {"output_tokens": 0}}}
        ]
        for index, (block, deltas) in enumerate(_blocks(answer)):
            events += _block_events(index, block, deltas)
        stop = {"stop_reason": STOP_REASONS[answer.finish_reason], "stop_sequence": None}
        events += [{"type": "message_delta", "delta": stop, "usage": usage}, {"type": "message_stop"}]
        return b"".join(sse(event, event["type"]) for event in events)

    def error(self, error: ApiError) -> dict[str, Any]:
        prefix = "prompt is too long: " if error.fault is Fault.CONTEXT else ""  # the words that clients look for
        return {"type": "error", "error": {"type": ERRORS[error.fault], "message": prefix + error.message}}

    def stream_error(self, error: ApiError) -> bytes:
        return sse(self.error(error), "error")


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function = {
        "name": tool["name"],
        "description": str(tool.get("description") or ""),
        "parameters": tool["input_schema"],
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any]) -> Any:
    if choice.get("type") == "tool":
        require(isinstance(choice.get("name"), str), "tool_choice: a name is missing")
        return {"type": "function", "function": {"name": choice["name"]}}
    require(among(choice.get("type"), TOOL_CHOICES), f"tool_choice: unknown type {choice.get('type')!r}")
    return TOOL_CHOICES[choice["type"]]


def _response_format(wish: dict[str, Any] | None) -> dict[str, Any] | None:
    if not wish:
        return None
    known = wish.get("type") == "json_schema" and isinstance(wish.get("schema"), dict)
    require(known, "output_config.format: must be a json_schema with a schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": wish["schema"]}}


def _head(request: ChatRequest, answer: Answer) -> dict[str, Any]:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": request.model}


def _blocks(answer: Answer) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each block of an answer with the deltas that stream it; arguments go out as the parser gave them."""
    if answer.reasoning:
        thought = {"type": "thinking", "thinking": answer.reasoning, "signature": SIGNATURE}
        deltas = [{"type": f"{name}_delta", name: thought[name]} for name in ("thinking", "signature")]
        yield thought, deltas
    if answer.text:
        yield {"type": "text", "text": answer.text}, [{"type": "text_delta", "text": answer.text}]
    for call in answer.tool_calls:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call)}
        yield block, [{"type": "input_json_delta", "partial_json": call.arguments}]


def _input(call: ToolCall) -> dict[str, Any]:
    """A call's arguments as the object that this dialect demands."""
    try:
        arguments = msgspec.json.decode(call.arguments or "{}")
    except msgspec.DecodeError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"unparsed": call.arguments}


EMPTY: dict[str, dict[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}


def _block_events(index: int, block: dict[str, Any], deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"type": "content_block_start", "index": index, "content_block": block | EMPTY[block["type"]]},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


def _usage(answer: Answer) -> dict[str, int]:
    """Here the cached part of a prompt is counted beside ``input_tokens``, not in it."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": answer.completion_tokens,
    }

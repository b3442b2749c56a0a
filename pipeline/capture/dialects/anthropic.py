"""Anthropic Messages, streamed and not, and its token counting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from pipeline.capture.dialects.base import (
    Action,
    Answer,
    ApiError,
    ChatRequest,
    Dialect,
    Fault,
    ToolCall,
    positive,
    require,
    route,
    sse,
)

ERRORS = {
    Fault.INVALID: "invalid_request_error",
    Fault.UNAUTHORIZED: "authentication_error",
    Fault.NOT_FOUND: "not_found_error",
    Fault.TOO_LARGE: "request_too_large",
    Fault.CONTEXT: "invalid_request_error",
    Fault.BUDGET: "invalid_request_error",
    Fault.UNAVAILABLE: "overloaded_error",
    Fault.INTERNAL: "api_error",
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
TOOL_CHOICES = {"auto": None, "any": "required", "none": "none"}
BILLING = "x-anthropic-billing-header"  # a client's note to its server in the system prompt, not for the model


class Anthropic(Dialect):
    """Blocks become messages: tool results are messages of their own, a late system message speaks as the user."""

    name = "anthropic"
    routes = (
        route("POST", r"/v1/messages", Action.TURN),
        route("POST", r"/v1/messages/count_tokens", Action.COUNT_TOKENS),
        route("HEAD", r"/", Action.HELLO, open=True),
        route("GET", r"/api/hello", Action.HELLO, open=True),
        route("HEAD", r"/api/hello", Action.HELLO, open=True),
    )

    def key(self, headers: Mapping[str, str]) -> str:
        return headers.get("x-api-key") or super().key(headers)

    def parse(self, body: dict[str, Any]) -> ChatRequest:
        wire = body.get("messages")
        require(isinstance(wire, list) and wire, "messages: must be a non-empty list")
        system = "\n\n".join(text for text in _texts(body.get("system")) if not text.startswith(BILLING))
        messages = [{"role": "system", "content": system}] if system else []
        for message in wire or ():
            require(isinstance(message, dict), "messages: each must be an object")
            messages += _assistant(message) if message.get("role") == "assistant" else _user(message)
        choice = body.get("tool_choice") or {"type": "auto"}
        require(isinstance(choice, dict), "tool_choice: must be an object")
        return ChatRequest(
            messages=messages,
            model=str(body.get("model") or ""),
            tools=_tools(body.get("tools")),
            tool_choice=_tool_choice(choice),
            parallel_tool_calls=not choice.get("disable_parallel_tool_use"),
            max_tokens=positive(body.get("max_tokens"), "max_tokens"),
            stream=bool(body.get("stream")),
        )

    def answer(self, request: ChatRequest, answer: Answer) -> dict[str, Any]:
        stop = {"stop_reason": STOP_REASONS[answer.finish_reason], "stop_sequence": None}
        return _head(request, answer) | {"content": list(_blocks(answer)), **stop, "usage": _usage(answer)}

    def events(self, request: ChatRequest, answer: Answer) -> bytes:
        usage = _usage(answer)
        start = _head(request, answer) | {"content": [], "stop_reason": None, "stop_sequence": None}
        events: list[dict[str, Any]] = [
            {"type": "message_start", "message": start | {"usage": usage | {"output_tokens": 0}}}
        ]
        for index, block in enumerate(_blocks(answer)):
            events += _block_events(index, block, answer)
        stop = {"stop_reason": STOP_REASONS[answer.finish_reason], "stop_sequence": None}
        events += [{"type": "message_delta", "delta": stop, "usage": usage}, {"type": "message_stop"}]
        return b"".join(sse(event, event["type"]) for event in events)

    def error(self, error: ApiError) -> dict[str, Any]:
        prefix = "prompt is too long: " if error.fault is Fault.CONTEXT else ""  # the words that clients look for
        return {"type": "error", "error": {"type": ERRORS[error.fault], "message": prefix + error.message}}

    def stream_error(self, error: ApiError) -> bytes:
        return sse(self.error(error), "error")


def _texts(content: Any) -> list[str]:
    """The texts of a string or of a list of blocks."""
    if content is None or isinstance(content, str):
        return [content] if content else []
    require(isinstance(content, list), "content: must be a string or a list of blocks")
    return [str(block.get("text", "")) for block in _checked(content) if block.get("type") == "text"]


def _checked(content: Any) -> Iterable[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    require(isinstance(content, list), "content: must be a string or a list of blocks")
    require(all(isinstance(block, dict) for block in content), "content: each block must be an object")
    return list(content)


def _user(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A user (or late system) message: its tool results, and its runs of text, in their order."""
    texts: list[str] = []
    for block in _checked(message.get("content")):
        if block.get("type") == "tool_result":
            if texts:
                yield {"role": "user", "content": "\n".join(texts)}
            texts = []
            result = "\n".join(_texts(block.get("content")))
            yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": result}
        else:
            require(block.get("type") == "text", f"content: unsupported block type {block.get('type')!r}")
            texts.append(str(block.get("text", "")))
    if texts:
        yield {"role": "user", "content": "\n".join(texts)}


def _assistant(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    blocks = list(_checked(message.get("content")))
    text = "".join(str(block.get("text", "")) for block in blocks if block.get("type") == "text")
    thoughts = "".join(str(block.get("thinking", "")) for block in blocks if block.get("type") == "thinking")
    calls = [
        {
            "id": str(block.get("id")),
            "type": "function",
            "function": {
                "name": str(block.get("name")),
                "arguments": msgspec.json.encode(block.get("input") or {}).decode(),
            },
        }
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    canonical: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
    canonical |= {"tool_calls": calls} if calls else {}
    yield canonical | ({"reasoning": thoughts} if thoughts else {})


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    """Client tools as functions; tools that only Anthropic's own servers run have no schema and are left out."""
    functions = [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description", ""),
                "parameters": tool["input_schema"],
            },
        }
        for tool in _checked(tools or [])
        if "input_schema" in tool
    ]
    return functions or None


def _tool_choice(choice: dict[str, Any]) -> Any:
    if choice.get("type") == "tool":
        return {"type": "function", "function": {"name": str(choice.get("name"))}}
    require(choice.get("type") in TOOL_CHOICES, f"tool_choice: unknown type {choice.get('type')!r}")
    return TOOL_CHOICES[choice["type"]]


def _head(request: ChatRequest, answer: Answer) -> dict[str, Any]:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": request.model}


def _blocks(answer: Answer) -> Iterator[dict[str, Any]]:
    if answer.reasoning:
        yield {"type": "thinking", "thinking": answer.reasoning, "signature": ""}
    if answer.text:
        yield {"type": "text", "text": answer.text}
    for call in answer.tool_calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call)}


def _input(call: ToolCall) -> dict[str, Any]:
    """A call's arguments as the object that this dialect demands."""
    try:
        arguments = msgspec.json.decode(call.arguments)
    except msgspec.DecodeError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"unparsed": call.arguments}


def _block_events(index: int, block: dict[str, Any], answer: Answer) -> list[dict[str, Any]]:
    """A whole block in three events; arguments go out as the parser gave them, malformed or not."""
    kind = block["type"]
    empty: dict[str, Any]
    if kind == "text":
        empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
    elif kind == "thinking":
        empty, delta = {"thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
    else:
        arguments = next(call.arguments for call in answer.tool_calls if call.id == block["id"])
        empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": arguments}
    return [
        {"type": "content_block_start", "index": index, "content_block": block | empty},
        {"type": "content_block_delta", "index": index, "delta": delta},
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

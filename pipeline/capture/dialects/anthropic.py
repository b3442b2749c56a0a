"""Anthropic Messages, streamed and not, and its token counting."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import msgspec
from msgspec import Raw

from pipeline.capture.canonical import ChatMessage, Item, ToolSet
from pipeline.capture.dialects.base import (
    DROPPED,
    OVERRIDDEN,
    Action,
    Answer,
    ApiError,
    ChatRequest,
    Dialect,
    Fault,
    Fields,
    ToolCall,
    among,
    counter,
    honoured,
    inner,
    positive,
    rejected,
    require,
    route,
    sse,
)

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
# Blocks of tools that Anthropic's servers run, and of state that they keep; nothing here can have made them.
SERVER_BLOCKS = re.compile(
    r"redacted_thinking|server_tool_use|mcp_tool_(use|listing)|\w+_tool_result|container_upload|fallback|browser_state"
    r"|tool_(addition|removal)"
)
ASSISTANT_BLOCKS = ("text", "compaction", "thinking", "tool_use")
SIGNATURE = "eW9rZQ=="  # clients throw away or rewrite a thought without one
SAYS_ERROR = re.compile(r"error|fail|exception|exit code|denied|rejected", re.IGNORECASE)


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
            texts = [BILLING.sub("", part["text"]) for part in _parts(_blocks_of(item, "system"))]
            text = "\n\n".join(filter(None, texts))
            return [{"role": "system", "content": text}] if text else []
        require(isinstance(item, dict) and among(item.get("role"), READERS), "messages: each must have a known role")
        return list(READERS[item["role"]](item))

    def lost(self, kind: str, item: Any) -> Iterable[str]:
        blocks = _blocks_of(item if kind == "system" else item.get("content"), "content")
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


def _blocks_of(content: Any, name: str) -> list[dict[str, Any]]:
    """The blocks of a string or of a list of blocks."""
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    require(isinstance(content, list), f"{name}: must be a string or a list of blocks")
    typed = all(isinstance(block, dict) and isinstance(block.get("type"), str) for block in content)
    require(typed, f"{name}: each block must be an object with a type")
    return list(content)


def _parts(blocks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Blocks as canonical content parts, those of Anthropic's servers left out."""
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if not SERVER_BLOCKS.fullmatch(block["type"]):
            require(block["type"] in PARTS, f"content: unsupported block type {block['type']!r}")
            parts += PARTS[block["type"]](block)
    return parts


def _text(block: dict[str, Any]) -> list[dict[str, Any]]:
    text = block.get("text") or ""
    require(isinstance(text, str), "content: a text must be a string")
    return [{"type": "text", "text": text}]


def _image(block: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": _url(block)}}]


def _document(block: dict[str, Any]) -> list[dict[str, Any]]:
    source = _source(block)
    if source.get("type") == "text":
        return [{"type": "text", "text": str(source.get("data"))}]
    if source.get("type") == "content":
        return _parts(_blocks_of(source.get("content"), "content"))
    return [{"type": "file", "file": {"file_data": _url(block), "filename": str(block.get("title") or "document")}}]


def _source(block: dict[str, Any]) -> dict[str, Any]:
    source = block.get("source")
    if not isinstance(source, dict):
        raise ApiError(Fault.INVALID, f"content: {block['type']} needs a source")
    return source


def _url(block: dict[str, Any]) -> str:
    source = _source(block)
    if source.get("type") == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    return str(source.get("url") or source.get("file_id"))


def _search_result(block: dict[str, Any]) -> list[dict[str, Any]]:
    head = {"type": "text", "text": f"{block.get('title')} ({block.get('source')})"}
    return [head, *_parts(_blocks_of(block.get("content"), "content"))]


def _compaction(block: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": str(block.get("content") or "")}]


def _tool_reference(block: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": f"The tool {block.get('tool_name')} is available now."}]


PARTS = {
    "text": _text,
    "image": _image,
    "document": _document,
    "search_result": _search_result,
    "compaction": _compaction,
    "tool_reference": _tool_reference,
}


def _content(parts: list[dict[str, Any]]) -> Any:
    """Parts as one text; a list when there is more than text, for the engine to take or refuse."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _user(message: dict[str, Any]) -> Iterator[ChatMessage]:
    """A user (or late system) message: its tool results, and its runs of other blocks, in their order."""
    blocks = _blocks_of(message.get("content"), "content")
    if not blocks:
        yield {"role": message["role"], "content": ""}
    for results, run in groupby(blocks, lambda block: bool(block["type"] == "tool_result")):
        if results:
            yield from _results(run)
        elif parts := _parts(run):
            yield {"role": message["role"], "content": _content(parts)}


def _results(blocks: Iterable[dict[str, Any]]) -> Iterator[ChatMessage]:
    """Tool results as texts; what else they hold follows the last of them, as the user's."""
    others: list[dict[str, Any]] = []
    for block in blocks:
        parts = _parts(_blocks_of(block.get("content"), "tool_result"))
        text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        others += [part for part in parts if part["type"] != "text"]
        if block.get("is_error") and not SAYS_ERROR.search(text):
            text = f"Error: {text}"
        yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id") or ""), "content": text}
    if others:
        yield {"role": "user", "content": others}


def _assistant(message: dict[str, Any]) -> Iterator[ChatMessage]:
    blocks = _blocks_of(message.get("content"), "content")
    known = [block for block in blocks if not SERVER_BLOCKS.fullmatch(block["type"])]
    unknown = [block["type"] for block in known if block["type"] not in ASSISTANT_BLOCKS]
    require(not unknown, f"content: unsupported block types {unknown} in an assistant message")
    text = "".join(part["text"] for part in _parts(block for block in known if block["type"] in PARTS))
    thoughts = "".join(str(block.get("thinking") or "") for block in known if block["type"] == "thinking")
    calls = [_call(block) for block in known if block["type"] == "tool_use"]
    canonical: ChatMessage = {"role": "assistant", "content": text or (None if calls else "")}
    canonical |= {"tool_calls": calls} if calls else {}
    yield canonical | ({"reasoning": thoughts} if thoughts else {})


READERS = {"user": _user, "system": _user, "assistant": _assistant}


def _call(block: dict[str, Any]) -> dict[str, Any]:
    require(isinstance(block.get("name"), str), "content: a tool_use needs a name")
    arguments = msgspec.json.encode(block.get("input") or {}).decode()
    function = {"name": block["name"], "arguments": arguments}
    return {"id": str(block.get("id") or ""), "type": "function", "function": function}


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

"""OpenAI Responses, streamed and not, with or without ``/v1``. No response is kept: each request holds its history."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import Raw

from pipeline.capture.canonical import ChatMessage, Item, Tool, ToolSet
from pipeline.capture.dialects.base import (
    Action,
    Answer,
    ApiError,
    ChatRequest,
    Dialect,
    among,
    counter,
    positive,
    require,
    route,
    sse,
)
from pipeline.capture.dialects.chat import openai_error
from pipeline.capture.dialects.fields import DROPPED, OVERRIDDEN, Fields, honoured, inner, rejected
from pipeline.capture.dialects.responses_items import (
    CLIENT_TOOLS,
    SERVER_ITEMS,
    call_item,
    joined_name,
    kind_of,
    messages_of,
    reasoning_item,
)

NO_STATE = "no responses are kept here: send the whole history in input"
TEXT_FIELDS = {"format": honoured(dict[str, Any]), "verbosity": DROPPED}
FIELDS = {
    "model": honoured(str),
    "input": honoured(Raw),
    "instructions": honoured(Raw),
    "tools": honoured(Raw),
    "tool_choice": honoured(),
    "parallel_tool_calls": honoured(bool),
    "max_output_tokens": honoured(),
    "stream": honoured(bool),
    "include": honoured(list[str]),
    "text": inner(TEXT_FIELDS),
    **dict.fromkeys(("temperature", "top_p", "reasoning"), OVERRIDDEN),
    **dict.fromkeys(
        (
            "store", "metadata", "client_metadata", "user", "service_tier", "prompt_cache_key", "prompt_cache_options",
            "prompt_cache_retention", "safety_identifier", "truncation", "max_tool_calls", "top_logprobs",
            "stream_options", "context_management", "moderation", "access_programs", "background_options", "image",
        ),
        DROPPED,
    ),
    "previous_response_id": rejected(hint=NO_STATE),
    "conversation": rejected(hint=NO_STATE),
    "prompt": rejected(hint="no prompts are kept here: send the text in input"),
    "background": rejected(False, hint="an answer is given while the client waits"),
}  # fmt: skip
ENCRYPTED = "reasoning.encrypted_content"
INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class Responses(Dialect):
    """Reasoning, message and calls of one turn are items of their own here and one message in canonical form."""

    name = "responses"
    fields = FIELDS
    routes = (
        route("POST", r"(/v1)?/responses", Action.TURN),
        route("WEBSOCKET", r"(/v1)?/responses", Action.SOCKET),
    )

    def items(self, given: Fields) -> list[Item]:
        require("input" in given.values, "input: missing")
        wire = bytes(given.get("input"))
        history = [Item("", wire)] if wire.startswith(b'"') else self.split("input", wire)
        return [*given.instructions("instructions"), *history]

    def messages(self, kind: str, item: Any) -> list[ChatMessage]:
        if kind == "system":
            require(isinstance(item, str), "instructions: must be a string")
            return [{"role": "system", "content": item}] if item else []
        return messages_of(item)

    def lost(self, kind: str, item: Any) -> Iterable[str]:
        wire = kind_of(item) if isinstance(item, dict) else ""
        secret = wire == "reasoning" and not messages_of(item)
        return [f"item_{wire}"] if wire in SERVER_ITEMS or secret else []

    def tool_set(self, tools: list[dict[str, Any]]) -> ToolSet:
        functions: list[dict[str, Any]] = []
        origins: dict[str, Tool] = {}
        dropped: list[str] = []
        for tool, namespace, about in _flat(tools):
            reader = TOOLS.get(str(tool.get("type")))
            if reader is None:
                dropped.append(counter("tool", tool.get("type")))
                continue
            origin, function = reader(tool, namespace)
            function |= {"description": "\n\n".join(filter(None, (about, function["description"])))}
            functions.append({"type": "function", "function": function})
            if origin.kind != "function" or namespace:
                origins[function["name"]] = origin
            if origin.kind == "custom" and tool.get("format") not in (None, {"type": "text"}):
                dropped.append("tool_format")
        return ToolSet(functions, origins, tuple(dropped))

    def request(self, given: Fields, path: str, query: str) -> ChatRequest:
        include = given.get("include", [])
        given.dropped += ["include"] if set(include) - {ENCRYPTED} else []
        return ChatRequest(
            self,
            [],
            [],
            model=given.get("model", ""),
            tool_choice=_tool_choice(given.get("tool_choice"), given),
            response_format=_response_format(given.get("text.format")),
            parallel_tool_calls=given.get("parallel_tool_calls", True),
            max_tokens=positive(given.get("max_output_tokens"), "max_output_tokens"),
            stream=given.get("stream", False),
            extra={"encrypted": ENCRYPTED in include, "tool_choice": given.get("tool_choice", "auto")},
        )

    def answer(self, request: ChatRequest, answer: Answer) -> dict[str, Any]:
        cut = answer.finish_reason == "length"
        return _response(request, answer, "incomplete" if cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": _output(request, answer),
            "usage": _usage(answer),
        }

    def events(self, request: ChatRequest, answer: Answer) -> bytes:
        final = self.answer(request, answer)
        blank = _response(request, answer, "in_progress")
        events: list[tuple[str, dict[str, Any]]] = [
            ("response.created", {"response": blank}),
            ("response.in_progress", {"response": blank}),
        ]
        for index, item in enumerate(final["output"]):
            events += [(name, {"output_index": index} | data) for name, data in _item_events(item)]
        events.append((f"response.{final['status']}", {"response": final}))
        return b"".join(_event(name, number, data) for number, (name, data) in enumerate(events))

    def warmed(self, request: ChatRequest, answer: Answer) -> bytes:
        """The events for a request that wants no output (``generate: false``)."""
        final = _response(request, answer, "completed") | {"usage": _usage(answer)}
        created = _event("response.created", 0, {"response": _response(request, answer, "in_progress")})
        return created + _event("response.completed", 1, {"response": final})

    def error(self, error: ApiError) -> dict[str, Any]:
        return openai_error(error, "input")

    def stream_error(self, error: ApiError) -> bytes:
        """An ``error`` event for clients that raise on it, then the failed response for those that wait for its end."""
        body = self.error(error)["error"]
        code = body["code"] or body["type"]
        cause = {"code": code, "message": body["message"]}
        failed = {"id": "resp_failed", "object": "response", "status": "failed", "error": cause, "output": []}
        flat = {"code": code, "message": body["message"], "param": body["param"], "error": body}
        return _event("error", 0, flat) + _event("response.failed", 1, {"response": failed})


def _flat(tools: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Each tool with the name of its namespace; the first of a namespace also with the namespace's description."""
    for tool in tools:
        if tool.get("type") != "namespace":
            yield tool, "", ""
            continue
        name, members = tool.get("name"), tool.get("tools")
        require(isinstance(name, str) and isinstance(members, list), "tools: a namespace needs a name and tools")
        for index, member in enumerate(members or ()):
            require(isinstance(member, dict), "tools: each must be an object")
            yield member, str(name), "" if index else str(tool.get("description") or "")


def _function(tool: dict[str, Any], namespace: str) -> tuple[Tool, dict[str, Any]]:
    origin = Tool("function", _tool_name(tool), namespace)
    return origin, _declared(origin, tool.get("description"), tool.get("parameters"))


def _custom(tool: dict[str, Any], namespace: str) -> tuple[Tool, dict[str, Any]]:
    """A tool that takes free text: a function with one string."""
    origin = Tool("custom", _tool_name(tool), namespace)
    return origin, _declared(origin, tool.get("description"), INPUT)


def _client(tool: dict[str, Any], namespace: str) -> tuple[Tool, dict[str, Any]]:
    kind = tool["type"]
    return Tool(kind, kind), _declared(Tool(kind, kind), CLIENT_TOOLS[kind].description, CLIENT_TOOLS[kind].schema)


TOOLS = {"function": _function, "custom": _custom, **dict.fromkeys(CLIENT_TOOLS, _client)}


def _tool_name(tool: dict[str, Any]) -> str:
    require(isinstance(tool.get("name"), str), "tools: a name is missing")
    return str(tool["name"])


def _declared(origin: Tool, description: Any, parameters: Any) -> dict[str, Any]:
    return {
        "name": joined_name(origin.name, origin.namespace),
        "description": str(description or ""),
        "parameters": parameters or {"type": "object", "properties": {}},
    }


def _tool_choice(choice: Any, given: Fields) -> Any:
    if choice in (None, "auto", "none", "required"):
        return choice
    require(isinstance(choice, dict), "tool_choice: unknown form")
    if choice.get("type") == "allowed_tools":
        return _allowed(choice, given)
    kind = choice.get("type")
    name = kind if among(kind, CLIENT_TOOLS) else choice.get("name")
    known = among(kind, TOOLS) and isinstance(name, str)
    require(known, f"tool_choice: type {kind!r} is not supported or its name is missing")
    return {"type": "function", "function": {"name": joined_name(str(name), choice.get("namespace") or "")}}


def _allowed(choice: dict[str, Any], given: Fields) -> Any:
    """One required tool is a named choice; any other list is not enforced, since that would change the prompt."""
    tools = choice.get("tools")
    require(isinstance(tools, list) and choice.get("mode") in ("auto", "required"), "tool_choice: unknown form")
    if choice["mode"] == "required" and len(tools or ()) == 1:
        return _tool_choice(tools[0], given)  # type: ignore[index]
    given.dropped.append("tool_choice.allowed_tools")
    return choice["mode"]


def _response_format(wish: dict[str, Any] | None) -> dict[str, Any] | None:
    if wish is None or wish.get("type") in ("text", "json_object"):
        return wish
    known = wish.get("type") == "json_schema" and isinstance(wish.get("schema"), dict)
    require(known, "text.format: must be text, json_object, or json_schema with a schema")
    schema = {key: wish[key] for key in ("name", "description", "schema", "strict") if wish.get(key) is not None}
    return {"type": "json_schema", "json_schema": {"name": "output"} | schema}


def _response(request: ChatRequest, answer: Answer, status: str) -> dict[str, Any]:
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": request.max_tokens,
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": request.extra.get("previous_response_id"),
        "store": False,
        "tool_choice": request.extra["tool_choice"],
        "tools": [],
        "truncation": "disabled",
        "metadata": {},
        "usage": None,
    }


def _output(request: ChatRequest, answer: Answer) -> list[dict[str, Any]]:
    items = []
    if answer.reasoning:
        items.append(reasoning_item(answer.id, answer.reasoning, request.extra["encrypted"]))
    if answer.text or not answer.tool_calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        head = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "status": "completed"}
        items.append(head | {"content": [part]})
    tools = request.tools or ToolSet([])
    items += [call_item(call, tools.origin(call.name)) for call in answer.tool_calls]
    if answer.finish_reason == "length" and "status" in items[-1]:
        items[-1]["status"] = "incomplete"
    return items


# The field that is streamed of an item's single part: (list of parts, their name in events and fields, index field).
STREAMED_PARTS = {
    "message": ("content", "content_part", "output_text", "content_index"),
    "reasoning": ("summary", "reasoning_summary_part", "reasoning_summary_text", "summary_index"),
}
STREAMED_FIELDS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}


def _item_events(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """One whole item as its events."""
    kind = item["type"]
    start = item | ({"status": "in_progress"} if "status" in item else {})
    if kind in STREAMED_PARTS:
        start |= {STREAMED_PARTS[kind][0]: []}
    elif kind in STREAMED_FIELDS:
        start |= {STREAMED_FIELDS[kind][0]: ""}
    yield "response.output_item.added", {"item": start}
    if kind in STREAMED_PARTS:
        yield from _part_events(item, *STREAMED_PARTS[kind])
    elif kind in STREAMED_FIELDS:
        field, name = STREAMED_FIELDS[kind]
        yield f"response.{name}.delta", {"item_id": item["id"], "delta": item[field]}
        yield f"response.{name}.done", {"item_id": item["id"], field: item[field]}
    yield "response.output_item.done", {"item": item}


def _part_events(
    item: dict[str, Any], parts: str, part_name: str, text_name: str, index: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    [part] = item[parts]
    head = {"item_id": item["id"], index: 0}
    logprobs: dict[str, Any] = {"logprobs": []} if "logprobs" in part else {}
    yield f"response.{part_name}.added", head | {"part": part | {"text": ""}}
    yield f"response.{text_name}.delta", head | {"delta": part["text"]} | logprobs
    yield f"response.{text_name}.done", head | {"text": part["text"]} | logprobs
    yield f"response.{part_name}.done", head | {"part": part}


def _event(name: str, number: int, data: dict[str, Any]) -> bytes:
    return sse({"type": name, "sequence_number": number} | data, name)


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }

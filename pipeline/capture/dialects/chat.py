"""OpenAI Chat Completions, streamed and not, with or without ``/v1``."""

from __future__ import annotations

from typing import Any

from msgspec import Raw

from pipeline.capture.canonical import ChatMessage, Item, ToolSet
from pipeline.capture.dialects.base import (
    Action,
    Answer,
    ApiError,
    ChatRequest,
    Dialect,
    Fault,
    among,
    counter,
    positive,
    require,
    route,
    sse,
)
from pipeline.capture.dialects.fields import DROPPED, OVERRIDDEN, Fields, honoured, inner, rejected

ERRORS = {  # fault -> (type, code)
    Fault.INVALID: ("invalid_request_error", None),
    Fault.UNAUTHORIZED: ("invalid_request_error", "invalid_api_key"),
    Fault.NOT_FOUND: ("invalid_request_error", "not_found"),
    Fault.METHOD: ("invalid_request_error", "method_not_supported"),
    Fault.SLOW_REQUEST: ("invalid_request_error", "request_timeout"),
    Fault.TOO_LARGE: ("invalid_request_error", "request_too_large"),
    Fault.MISDIRECTED: ("invalid_request_error", "misdirected_request"),
    Fault.CONTEXT: ("invalid_request_error", "context_length_exceeded"),
    Fault.BUDGET: ("invalid_request_error", "budget_exceeded"),
    Fault.RATE_LIMITED: ("rate_limit_error", "rate_limit_exceeded"),
    Fault.OVERLOADED: ("server_error", "overloaded"),
    Fault.UNAVAILABLE: ("server_error", "service_unavailable"),
    Fault.TIMEOUT: ("server_error", "timeout"),
    Fault.INTERNAL: ("server_error", "internal_error"),
}
STREAM_FIELDS = {"include_usage": honoured(bool), "include_obfuscation": DROPPED, "continuous_usage_stats": DROPPED}
FIELDS = {
    "model": honoured(str),
    "messages": honoured(Raw),
    "tools": honoured(Raw),
    "tool_choice": honoured(),
    "parallel_tool_calls": honoured(bool),
    "response_format": honoured(dict[str, Any]),
    "max_tokens": honoured(),
    "max_completion_tokens": honoured(),
    "stream": honoured(bool),
    "stream_options": inner(STREAM_FIELDS),
    **dict.fromkeys(
        (
            "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
            "seed", "stop", "logit_bias", "reasoning_effort", "reasoning", "chat_template_kwargs", "enable_thinking",
            "thinking",
        ),
        OVERRIDDEN,
    ),
    **dict.fromkeys(
        (
            "store", "metadata", "user", "service_tier", "prompt_cache_key", "prompt_cache_retention",
            "safety_identifier", "verbosity", "logprobs", "top_logprobs", "return_token_ids", "web_search_options",
            "prediction", "moderation", "prompt_cache_options",
        ),
        DROPPED,
    ),
    "n": rejected(1),
    "functions": rejected([]),
    "function_call": rejected(),
    "audio": rejected(),
    "modalities": rejected(["text"]),
}  # fmt: skip


class Chat(Dialect):
    """Canonical form and wire form agree here, so parsing is checking."""

    name = "chat"
    fields = FIELDS
    routes = (
        route("POST", r"(/v1)?/chat/completions", Action.TURN),
        route("GET", r"(/v1)?/models", Action.MODELS),
    )

    def items(self, given: Fields) -> list[Item]:
        require("messages" in given.values, "messages: missing")
        return self.split("messages", given.get("messages"))

    def messages(self, kind: str, item: Any) -> list[ChatMessage]:
        require(isinstance(item, dict) and among(item.get("role"), READERS), "messages: each must have a known role")
        return [READERS[item["role"]](item)]

    def tool_set(self, tools: list[dict[str, Any]]) -> ToolSet:
        functions = [tool for tool in tools if tool.get("type") == "function"]
        for tool in functions:
            named = isinstance(tool.get("function"), dict) and isinstance(tool["function"].get("name"), str)
            require(named, "tools: a name is missing")
        others = tuple(counter("tool", tool.get("type")) for tool in tools if tool.get("type") != "function")
        return ToolSet([{"type": "function", "function": tool["function"]} for tool in functions], dropped=others)

    def request(self, given: Fields, path: str, query: str) -> ChatRequest:
        asked = given.get("max_completion_tokens", given.get("max_tokens"))
        choice = given.get("tool_choice")
        require(choice in (None, "auto", "none", "required") or _names_function(choice), "tool_choice: unknown form")
        return ChatRequest(
            self,
            [],
            [],
            model=given.get("model", ""),
            tool_choice=choice,
            response_format=given.get("response_format"),
            parallel_tool_calls=given.get("parallel_tool_calls", True),
            max_tokens=positive(asked, "max_tokens"),
            stream=given.get("stream", False),
            include_usage=given.get("stream_options.include_usage", False),
        )

    def answer(self, request: ChatRequest, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or None, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = _tool_calls(answer)
        else:
            message["content"] = answer.text
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
        return _head(request, answer, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}

    def events(self, request: ChatRequest, answer: Answer) -> bytes:
        head = _head(request, answer, "chat.completion.chunk")
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if answer.reasoning:
            deltas.append({"reasoning_content": answer.reasoning})
        if answer.text:
            deltas.append({"content": answer.text})
        deltas += [{"tool_calls": [{"index": i} | call]} for i, call in enumerate(_tool_calls(answer))]
        chunks = [head | {"choices": [_delta(delta, None)]} for delta in deltas]
        chunks.append(head | {"choices": [_delta({}, answer.finish_reason)]})
        if request.include_usage:
            chunks.append(head | {"choices": [], "usage": _usage(answer)})
        return b"".join(sse(chunk) for chunk in chunks) + b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> dict[str, Any]:
        return openai_error(error, "messages")

    def stream_error(self, error: ApiError) -> bytes:
        return sse(self.error(error))


def openai_error(error: ApiError, history: str) -> dict[str, Any]:
    """The JSON body of an error; ``history`` is the parameter that holds the messages."""
    kind, code = ERRORS[error.fault]
    param = history if error.fault is Fault.CONTEXT else None
    return {"error": {"message": error.message, "type": kind, "param": param, "code": code}}


def _names_function(choice: Any) -> bool:
    function = choice.get("function") if isinstance(choice, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _content(message: dict[str, Any]) -> Any:
    """A string as it is, text parts joined; other parts stay, for the engine to take or refuse."""
    content = message.get("content")
    if not isinstance(content, list):
        require(content is None or isinstance(content, str), "content: must be a string or a list of parts")
        return content
    require(all(isinstance(part, dict) for part in content), "content: each part must be an object")
    if all(among(part.get("type"), ("text", "refusal")) for part in content):
        return "\n".join(str(part.get("text") or part.get("refusal") or "") for part in content)
    return content


def _system(message: dict[str, Any]) -> ChatMessage:
    """Also ``developer``, which the engine would hoist to the front."""
    return {"role": "system", "content": _content(message) or ""}


def _user(message: dict[str, Any]) -> ChatMessage:
    return {"role": "user", "content": _content(message) or ""}


def _tool(message: dict[str, Any]) -> ChatMessage:
    call_id = str(message.get("tool_call_id") or "")
    return {"role": "tool", "tool_call_id": call_id, "content": _content(message) or ""}


def _assistant(message: dict[str, Any]) -> ChatMessage:
    calls = message.get("tool_calls") or []
    require(isinstance(calls, list), "tool_calls: must be a list")
    content = _content(message)
    canonical: ChatMessage = {"role": "assistant", "content": content or (None if calls else "")}
    if calls:
        canonical["tool_calls"] = [_call(call) for call in calls]
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return canonical | ({"reasoning": reasoning} if isinstance(reasoning, str) else {})


def _call(call: Any) -> dict[str, Any]:
    function: Any = call.get("function") if isinstance(call, dict) else None
    require(isinstance(function, dict) and isinstance(function.get("name"), str), "tool_calls: a name is missing")
    arguments = function.get("arguments") or "{}"
    require(isinstance(arguments, str), "tool_calls: arguments must be a string")
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


READERS = {"system": _system, "developer": _system, "user": _user, "tool": _tool, "assistant": _assistant}


def _tool_calls(answer: Answer) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.tool_calls
    ]


def _head(request: ChatRequest, answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": request.model}


def _delta(delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
    }

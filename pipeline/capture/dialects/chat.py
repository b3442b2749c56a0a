"""OpenAI Chat Completions, streamed and not, with or without ``/v1``."""

from __future__ import annotations

from typing import Any

from pipeline.capture.dialects.base import (
    Action,
    Answer,
    ApiError,
    ChatRequest,
    Dialect,
    Fault,
    positive,
    require,
    route,
    sse,
)

ERRORS = {  # fault -> (type, code, param)
    Fault.INVALID: ("invalid_request_error", None, None),
    Fault.UNAUTHORIZED: ("invalid_request_error", "invalid_api_key", None),
    Fault.NOT_FOUND: ("invalid_request_error", "not_found", None),
    Fault.TOO_LARGE: ("invalid_request_error", "request_too_large", None),
    Fault.CONTEXT: ("invalid_request_error", "context_length_exceeded", "messages"),
    Fault.BUDGET: ("invalid_request_error", "call_budget_exceeded", None),
    Fault.UNAVAILABLE: ("server_error", "service_unavailable", None),
    Fault.INTERNAL: ("server_error", "internal_error", None),
}


class Chat(Dialect):
    """Canonical form and wire form agree here, so parsing is checking."""

    name = "chat"
    routes = (
        route("POST", r"(/v1)?/chat/completions", Action.TURN),
        route("GET", r"(/v1)?/models", Action.MODELS),
    )

    def parse(self, body: dict[str, Any]) -> ChatRequest:
        messages, tools = body.get("messages"), body.get("tools") or None
        require(isinstance(messages, list) and messages, "messages must be a non-empty list")
        require(tools is None or isinstance(tools, list), "tools must be a list")
        options = body.get("stream_options") or {}
        require(isinstance(options, dict), "stream_options must be an object")
        asked = body.get("max_completion_tokens", body.get("max_tokens"))
        return ChatRequest(
            messages=[_message(message) for message in messages or ()],
            model=str(body.get("model") or ""),
            tools=tools,
            tool_choice=body.get("tool_choice"),
            response_format=body.get("response_format"),
            parallel_tool_calls=body.get("parallel_tool_calls") is not False,
            max_tokens=positive(asked, "max_tokens"),
            stream=bool(body.get("stream")),
            include_usage=bool(options.get("include_usage")),
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
        kind, code, param = ERRORS[error.fault]
        return {"error": {"message": error.message, "type": kind, "param": param, "code": code}}

    def stream_error(self, error: ApiError) -> bytes:
        return sse(self.error(error))


def _message(message: Any) -> dict[str, Any]:
    """A message as render accepts it: no ``developer`` role (the engine would hoist it), no null tool content."""
    require(isinstance(message, dict) and isinstance(message.get("role"), str), "each message must have a role")
    if message["role"] == "developer":
        return message | {"role": "system"}
    if message["role"] == "tool" and message.get("content") is None:
        return message | {"content": ""}
    return dict(message)


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
    }

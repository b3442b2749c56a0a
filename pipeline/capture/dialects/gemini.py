"""Gemini's generateContent, streamed and not, and its token counting. Names may be spelt in snake_case as well."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qs

import msgspec
from msgspec import Raw

from pipeline.capture.canonical import ChatMessage, Item, ToolSet
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
from pipeline.capture.dialects.gemini_parts import (
    READERS,
    SERVER_PARTS,
    camel,
    canonical_parts,
    function_of,
    json_schema,
    objects,
    parts_of,
    spelt,
)

STATUS_NAMES = {
    Fault.INVALID: "INVALID_ARGUMENT",
    Fault.UNAUTHORIZED: "UNAUTHENTICATED",
    Fault.NOT_FOUND: "NOT_FOUND",
    Fault.METHOD: "UNIMPLEMENTED",
    Fault.SLOW_REQUEST: "DEADLINE_EXCEEDED",
    Fault.TOO_LARGE: "INVALID_ARGUMENT",
    Fault.MISDIRECTED: "FAILED_PRECONDITION",
    Fault.CONTEXT: "INVALID_ARGUMENT",
    Fault.BUDGET: "FAILED_PRECONDITION",
    Fault.RATE_LIMITED: "RESOURCE_EXHAUSTED",
    Fault.OVERLOADED: "UNAVAILABLE",
    Fault.UNAVAILABLE: "UNAVAILABLE",
    Fault.TIMEOUT: "DEADLINE_EXCEEDED",
    Fault.INTERNAL: "INTERNAL",
}
GENERATION_FIELDS = {
    "maxOutputTokens": honoured(),
    "responseMimeType": honoured(str),
    "responseSchema": honoured(dict[str, Any]),
    "responseJsonSchema": honoured(dict[str, Any]),
    **dict.fromkeys(
        (
            "temperature", "topP", "topK", "seed", "stopSequences", "presencePenalty", "frequencyPenalty",
            "thinkingConfig",
        ),
        OVERRIDDEN,
    ),
    **dict.fromkeys(
        (
            "responseLogprobs", "logprobs", "mediaResolution", "speechConfig", "imageConfig", "audioTimestamp",
            "audioTranscriptionConfig", "translationConfig", "routingConfig", "modelSelectionConfig",
            "enableAffectiveDialog", "enableEnhancedCivicAnswers", "generationOutputConfig",
        ),
        DROPPED,
    ),
    "candidateCount": rejected(1),
    "responseModalities": rejected([], ["TEXT"]),
    "responseFormat": rejected([], hint="use responseMimeType and responseJsonSchema"),
    "continuationToken": rejected(),
}  # fmt: skip
TOOL_CONFIG_FIELDS = {
    "functionCallingConfig": honoured(dict[str, Any]),
    "retrievalConfig": DROPPED,
    "includeServerSideToolInvocations": DROPPED,
}
FIELDS = {
    "contents": honoured(Raw),
    "systemInstruction": honoured(Raw),
    "tools": honoured(Raw),
    "toolConfig": inner(TOOL_CONFIG_FIELDS),
    "generationConfig": inner(GENERATION_FIELDS),
    "generateContentRequest": honoured(Raw),  # countTokens: the whole request to be counted
    **dict.fromkeys(("model", "safetySettings", "labels", "store", "serviceTier", "modelArmorConfig"), DROPPED),
    "cachedContent": rejected(hint="nothing is cached here: send the content itself"),
}
MALFORMED = "MALFORMED_FUNCTION_CALL"
FINISH_REASONS = {"stop": "STOP", "length": "MAX_TOKENS", "tool_calls": "STOP"}
MODES = {"MODE_UNSPECIFIED": None, "AUTO": None, "VALIDATED": None, "NONE": "none", "ANY": "required"}
VERSION_AND_MODEL = r"(?:/v1\w*)?/(?P<model>.+)"
TURN_PATH = re.compile(VERSION_AND_MODEL + ":(?P<verb>generateContent|streamGenerateContent)")
SIGNATURE = "eW9rZQ=="  # clients throw away a thought without one


class Gemini(Dialect):
    """Parts become messages: a function response is a message of its own. Model and verb stand in the path."""

    name = "gemini"
    fields = FIELDS
    ping = b""  # Gemini CLI takes no comments
    routes = (
        route("POST", TURN_PATH.pattern, Action.TURN),
        route("POST", VERSION_AND_MODEL + ":countTokens", Action.COUNT_TOKENS),
        route("GET", r"/v1(alpha|beta)\d*/models", Action.MODELS),
    )

    def sift(self, body: bytes) -> Fields:
        given = super().sift(body)
        whole = given.get("generateContentRequest")
        return given if whole is None else super().sift(bytes(whole))

    def spelling(self, name: str) -> str:
        return camel(name)

    def items(self, given: Fields) -> list[Item]:
        require("contents" in given.values, "contents: missing")
        return [*given.instructions("systemInstruction"), *self.split("contents", given.get("contents"))]

    def messages(self, kind: str, item: Any) -> list[ChatMessage]:
        if kind == "system":
            text = "\n".join(part["text"] for part in canonical_parts(parts_of(item)) if part["type"] == "text")
            return [{"role": "system", "content": text}] if text else []
        role = item.get("role") or "user" if isinstance(item, dict) else None
        require(among(role, READERS), "contents: each must have a known role")
        return list(READERS[str(role)](parts_of(item)))

    def lost(self, kind: str, item: Any) -> Iterable[str]:
        return [f"part_{name}" for part in parts_of(item) for name in SERVER_PARTS if name in part]

    def tool_set(self, tools: list[dict[str, Any]]) -> ToolSet:
        named = [(name, value) for tool in tools for name, value in spelt(tool).items()]
        declared = [each for name, value in named if name == "functionDeclarations" for each in objects(name, value)]
        hosted = tuple(counter("tool", name) for name, _ in named if name != "functionDeclarations")
        return ToolSet([function_of(each) for each in declared], dropped=hosted)

    def request(self, given: Fields, path: str, query: str) -> ChatRequest:
        found = TURN_PATH.fullmatch(path)
        config = spelt(given.get("toolConfig.functionCallingConfig", {}))
        return ChatRequest(
            self,
            [],
            [],
            model=_model(found["model"]) if found else "",
            tool_choice=_tool_choice(config, given),
            response_format=_response_format(given),
            max_tokens=positive(given.get("generationConfig.maxOutputTokens"), "maxOutputTokens"),
            stream=bool(found and found["verb"] == "streamGenerateContent"),
            extra={"sse": parse_qs(query).get("alt") == ["sse"]},
        )

    def answer(self, request: ChatRequest, answer: Answer) -> dict[str, Any]:
        reason, parts = _outcome(answer)
        return _chunk(request, answer, parts, reason)

    def events(self, request: ChatRequest, answer: Answer) -> bytes:
        """One chunk a part, the last one with the reason and the usage; a JSON list without ``alt=sse``."""
        reason, parts = _outcome(answer)
        chunks = [_chunk(request, answer, [part]) for part in parts[:-1]]
        chunks.append(_chunk(request, answer, parts[-1:], reason))
        return b"".join(map(sse, chunks)) if request.extra["sse"] else msgspec.json.encode(chunks)

    def error(self, error: ApiError) -> dict[str, Any]:
        message = error.message
        if error.fault is Fault.CONTEXT:  # the words that clients look for
            message = f"The input token count exceeds the maximum number of tokens allowed. {message}"
        body = {"code": self.status(error), "message": message, "status": STATUS_NAMES[error.fault]}
        if error.retry_after is not None:
            retry = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": f"{error.retry_after}s"}
            body["details"] = [retry]
        return {"error": body}

    def stream_error(self, error: ApiError) -> bytes:
        return sse(self.error(error))

    def token_count(self, count: int) -> dict[str, Any]:
        return {"totalTokens": count}


def _model(name: str) -> str:
    """The model's name without the collection that it is in."""
    return name.split("models/", 1)[-1].removeprefix("tunedModels/")


def _tool_choice(config: dict[str, Any], given: Fields) -> Any:
    """One allowed name is a named choice; any other list is not enforced, since that would change the prompt."""
    mode = str(config.get("mode") or "AUTO").upper()
    require(mode in MODES, f"functionCallingConfig.mode: unknown mode {mode}")
    names = config.get("allowedFunctionNames") or []
    require(isinstance(names, list) and all(isinstance(name, str) for name in names), "allowedFunctionNames: wrong")
    if mode == "ANY" and len(names) == 1:
        return {"type": "function", "function": {"name": names[0]}}
    given.dropped += ["allowedFunctionNames"] if names else []
    return MODES[mode]


def _response_format(given: Fields) -> dict[str, Any] | None:
    kind = given.get("generationConfig.responseMimeType", "text/plain")
    plain = given.get("generationConfig.responseJsonSchema")
    schema = plain if plain is not None else json_schema(given.get("generationConfig.responseSchema"))
    require(kind in ("text/plain", "application/json"), f"responseMimeType: {kind} is not supported")
    if kind == "text/plain":
        require(schema is None, "responseSchema: needs the responseMimeType application/json")
        return None
    if schema is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}


def _outcome(answer: Answer) -> tuple[str, list[dict[str, Any]]]:
    """The finish reason and the parts. The API has no shape for a call with malformed arguments, only a reason."""
    parts: list[dict[str, Any]] = []
    if answer.reasoning:
        parts.append({"text": answer.reasoning, "thought": True, "thoughtSignature": SIGNATURE})
    if answer.text:
        parts.append({"text": answer.text})
    arguments = [_arguments(call) for call in answer.tool_calls]
    if None in arguments:
        return ("MAX_TOKENS" if answer.finish_reason == "length" else MALFORMED), parts
    calls = zip(answer.tool_calls, arguments, strict=True)
    parts += [{"functionCall": {"id": call.id, "name": call.name, "args": args}} for call, args in calls]
    return FINISH_REASONS[answer.finish_reason], parts


def _arguments(call: ToolCall) -> dict[str, Any] | None:
    try:
        arguments = msgspec.json.decode(call.arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def _chunk(request: ChatRequest, answer: Answer, parts: list[dict[str, Any]], reason: str = "") -> dict[str, Any]:
    """A response; the last one (or the only one) has a finish reason and the usage."""
    candidate: dict[str, Any] = {"content": {"role": "model"} | ({"parts": parts} if parts else {}), "index": 0}
    chunk = {"candidates": [candidate], "modelVersion": request.model, "responseId": answer.id}
    if not reason:
        return chunk
    candidate["finishReason"] = reason
    if reason == MALFORMED:
        bad = next(call for call in answer.tool_calls if _arguments(call) is None)
        candidate["finishMessage"] = f"Malformed function call: {bad.name}({bad.arguments})"
    return chunk | {"usageMetadata": _usage(answer)}


def _usage(answer: Answer) -> dict[str, int]:
    thought = answer.reasoning_tokens
    usage = {
        "promptTokenCount": answer.prompt_tokens,
        "candidatesTokenCount": answer.completion_tokens - thought,
        "totalTokenCount": answer.prompt_tokens + answer.completion_tokens,
        "cachedContentTokenCount": answer.cached_tokens,
        "thoughtsTokenCount": thought,
    }
    return {name: count for name, count in usage.items() if count or name not in ZERO_LEFT_OUT}


ZERO_LEFT_OUT = ("cachedContentTokenCount", "thoughtsTokenCount")
